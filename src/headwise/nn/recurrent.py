"""h_i = GRU(x_i, h_(i-1)): a recurrent layer with the interface of an attention layer, as a baseline.

Cho et al. 2014, torch's implementation.  O(n) work per layer, in O(n) sequential steps that cannot run in parallel.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headwise.cost import Cost
from headwise.errors import ShapeError, UnsupportedError
from headwise.operators.masks import Mask
from headwise.shapes import autocasting, no_empty_axis, same_axis, same_kind, truth_values, whole_numbers


@final
class Recurrent(nn.Module):
    """`layer(x)` for x (*batch, n, width); unless `causal` it runs in both directions, each half as wide."""

    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        whole_numbers("Recurrent", least=0, width=width)
        truth_values("Recurrent", causal=causal)
        if width < 1 or (width % 2 and not causal):
            raise ShapeError(f"Recurrent: width must be even to be split over two directions, but is {width}")
        self.width, self.causal = width, causal
        self.gru = nn.GRU(width, width if causal else width // 2, batch_first=True, bidirectional=not causal)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """`key_mask` (*batch, n) must be True at leading positions; outputs at the others are the output bias."""
        no_empty_axis("Recurrent", x=x)
        same_axis("Recurrent", "width", layer=self.width, x=x.shape[-1])
        same_kind("Recurrent", x=x)
        if not autocasting(x.device):
            same_kind("Recurrent", x=x, weight=self.out.weight)
        truth_values("Recurrent", causal=causal)
        if causal and not self.causal:
            raise UnsupportedError("Recurrent: this layer runs in both directions; build it with causal=True")
        *batch, n, _ = x.shape
        flat = x.reshape(-1, n, self.width)
        return self.out(self._states(flat, key_mask, batch, n)).reshape(*batch, n, self.width)

    def _states(self, x: Tensor, key_mask: Tensor | None, batch: list[int], n: int) -> Tensor:
        if key_mask is None:
            return self.gru(x)[0]
        key_mask = Mask.checked("Recurrent", n, n, key_mask=key_mask, batch=batch, device=x.device).key_mask
        assert key_mask is not None
        visible = key_mask.expand(*batch, n).reshape(-1, n)
        lengths = visible.sum(-1)
        if not bool((visible == (torch.arange(n, device=x.device) < lengths.unsqueeze(-1))).all()):
            raise UnsupportedError("Recurrent: padding must follow the tokens; use right-padded sequences")
        # empty sequences run for one step, whose state is masked below
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        states = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=n)[0]
        return states.masked_fill(~visible.unsqueeze(-1), 0)

    def cost(self, n: int) -> Cost:
        """Three gates of input and state, then the output projection; n sequential steps."""
        hidden = self.gru.hidden_size
        directions = 1 if self.causal else 2
        work = directions * 3 * hidden * (self.width + hidden) + self.width * self.width
        return Cost(n * work, n * 4 * self.width, n)
