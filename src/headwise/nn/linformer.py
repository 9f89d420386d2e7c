"""softmax(s x W_Q ((E x) W_K)^T) (F x) W_V W_O: Linformer that shortens the sequence before it maps it.

E (x W) = (E x) W, so keys and values are mapped as r rows instead of n: of the four products of n rows that a layer
has, two remain.  Wang et al. 2020 (arXiv:2006.04768) project after the maps, as `MultiHead` with a `LearnedProjection`
does, which a projection for each head needs; here all heads share E and F.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.nn.builders import Fit, LearnedProjection
from headwise.nn.multihead import MultiHead
from headwise.operators.linear.projected import projected


@final
class ShortenedAttention(nn.Module):
    """layer(x) for x (*batch, n, width), as MultiHead, with E and F (rank, length) learned; `shared` makes them one.

    The other options are those of `MultiHead`, held as `.attend`; `fit` says what becomes of other lengths, as in
    `LearnedProjection`, held as `.projection`.

    >>> import torch
    >>> ShortenedAttention(16, 2, length=12, rank=4)(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10, 16])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        rank: int,
        *,
        shared: bool = False,
        fit: Fit = "slice",
        **options: Any,
    ) -> None:
        super().__init__()
        self.projection = LearnedProjection(projected, length, rank, shared=shared, fit=fit)
        self.attend = MultiHead(width, heads, **options)

    def forward(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """`key_mask` (*batch, n) is True at real positions; outputs there equal those of the shorter sequence."""
        if causal:
            raise UnsupportedError(
                "ShortenedAttention: a projection mixes positions, so a query would see later ones; use MultiHead with "
                "LearnedBlocks(projected_blocks, ...)"
            )
        learned = self.projection
        e = learned.fitted(learned.e, x.shape[-2])
        real = x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)
        keys = e.apply(real)
        values = keys if learned.f is None else learned.fitted(learned.f, x.shape[-2]).apply(real)
        return self.attend(x, (keys, values))
