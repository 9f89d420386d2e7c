"""Contract cases of operators by relative position."""

from __future__ import annotations

from functools import partial

import torch

from headwise.operators import offset, shift, toeplitz, toeplitz_softmax
from headwise.testing import references
from tests.operators.properties import NOTHING, PADDING, same

_shift = partial(same, build=shift, twin=references.shift)
SHIFT = [
    *(_shift(f"shift, 1-D, {border}", grid=(6,), offset=(2,), border=border) for border in references.BORDERS),
    *(_shift(f"shift, 2-D, {border}", grid=(3, 4), offset=(1, -2), border=border) for border in references.BORDERS),
    *(
        _shift(f"shift, 3-D, {border}", grid=(2, 3, 4), offset=(-1, 0, 3), border=border)
        for border in references.BORDERS
    ),
    _shift("shift, reflect, twice over", grid=(3,), offset=(-7,), border="reflect"),
    _shift("shift, zeros, out of sight", grid=(3, 2), offset=(0, 9), border="zeros"),
    _shift("shift, half turn", grid=(6,), offset=(3,)),
    *(
        _shift(f"shift, stride, {border}", grid=(5, 6), offset=(-1, 1), border=border, stride=(2, 3), queries=(3, 2))
        for border in references.BORDERS
    ),
]


_toeplitz = partial(same, build=toeplitz, twin=references.toeplitz)
_relative = partial(same, build=toeplitz_softmax, twin=references.toeplitz_softmax)
WINDOW = torch.where(torch.arange(11).sub(6).abs() <= 1, torch.linspace(-1, 1, 11, dtype=torch.float64), -torch.inf)
TOEPLITZ = [
    _toeplitz("toeplitz", inputs={"weights": (11,)}, m=6, n=6),
    _toeplitz("toeplitz, more keys", inputs={"weights": (2, 3, 11)}, m=5, n=7),
    _toeplitz("toeplitz, fewer keys", inputs={"weights": (2, 11)}, m=7, n=5),
    _toeplitz("toeplitz, symmetric", inputs={"weights": torch.arange(-5, 6).abs().double()}, m=6, n=6),
    _toeplitz("toeplitz, stochastic", inputs={"weights": torch.full((11,), 1 / 7, dtype=torch.float64)}, m=5, n=7),
    _toeplitz("toeplitz, causal", inputs={"weights": torch.arange(6, -5, -1).clamp(min=0).double()}, m=6, n=6),
    _relative("toeplitz softmax", inputs={"logits": (11,)}, m=6, n=6),
    _relative("toeplitz softmax, window", inputs={"logits": WINDOW}, m=7, n=5),
    _relative("toeplitz softmax, nothing to see", inputs={"logits": (11,)}, m=5, n=7, key_mask=NOTHING),
    _relative("toeplitz softmax, causal, fewer keys", inputs={"logits": (3, 11)}, m=7, n=5, causal=True),
    _relative("toeplitz softmax, everything", inputs={"logits": (3, 11)}, m=5, n=7, causal=True, key_mask=PADDING),
]

REAL = torch.tensor([[False, True, True, True, True, False, False], [True] * 7])  # consecutive keys
_offset = partial(same, build=offset, twin=references.offset)
OFFSET = [
    _offset("offset", m=6, n=6, by=2),
    _offset("offset, more keys", m=3, n=7, by=-2),
    _offset("offset, fewer keys", m=7, n=5, by=-1),
    _offset("offset, nothing to attend to", m=5, n=7, by=1, key_mask=NOTHING),
    _offset("offset, padding", m=5, n=7, by=-3, key_mask=REAL[:, None]),
]
