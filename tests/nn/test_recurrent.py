"""The recurrent baseline: padding, causality, cost."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ShapeError, UnsupportedError
from headwise.nn.recurrent import Recurrent


def test_recurrent_padding_and_causality() -> None:
    x = torch.randn(2, 9, 8)
    key_mask = torch.arange(9) < torch.tensor([[9], [4]])
    bidirectional = Recurrent(8)
    out = bidirectional(x, key_mask=key_mask)
    torch.testing.assert_close(out[1, :4], bidirectional(x[1, :4]))
    torch.testing.assert_close(out[0], bidirectional(x[:1])[0])
    forward = Recurrent(8, causal=True)
    torch.testing.assert_close(forward(x, causal=True)[:, :5], forward(x[:, :5]))
    assert forward.cost(100).depth == 100
    with pytest.raises(UnsupportedError, match="build it with causal=True"):
        bidirectional(x, causal=True)
    with pytest.raises(UnsupportedError, match="padding must follow"):
        bidirectional(x, key_mask=key_mask.flip(-1))


def test_odd_widths_are_rejected() -> None:
    with pytest.raises(ShapeError, match="even to be split"):
        Recurrent(7)
