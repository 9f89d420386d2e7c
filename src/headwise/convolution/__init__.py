"""Convert convolutions to attention layers that compute the same function, and back: `headwise.convert(module)`."""

from __future__ import annotations

from headwise.convolution.conversion import convert, exact, soft, soft_separable, to_convolution, with_content
from headwise.convolution.receptive_field_recorder import (
    ReceptiveFieldRecorder,
    layer_receptive_fields,
    model_receptive_fields,
)

__all__ = [
    "ReceptiveFieldRecorder",
    "convert",
    "exact",
    "layer_receptive_fields",
    "model_receptive_fields",
    "soft",
    "soft_separable",
    "to_convolution",
    "with_content",
]
