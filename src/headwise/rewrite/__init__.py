"""Replace layers by others that compute the same, and hand back a receipt: convolution as attention, and back."""

from headwise.rewrite.convolution import convert, to_convolution
from headwise.rewrite.receipt import Left, Receipt
from headwise.rewrite.taps import exact, soft, soft_grid

__all__ = ["Left", "Receipt", "convert", "exact", "soft", "soft_grid", "to_convolution"]
