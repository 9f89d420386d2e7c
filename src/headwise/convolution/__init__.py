"""Convert convolutions to attention layers that compute the same function, and back: `headwise.convert(module)`."""

from __future__ import annotations

from headwise.convolution.convert import convert, to_convolution
from headwise.convolution.kernel_heads import exact, soft, soft_grid

__all__ = ["convert", "exact", "soft", "soft_grid", "to_convolution"]
