"""softmax(s x W_Q ((E x) W_K)^T) (F x) W_V W_O: Linformer attention that shortens the sequence before W_K and W_V.

E (x W) = (E x) W, so W_K and W_V are applied to r rows instead of n.  Wang et al. 2020 (arXiv:2006.04768) apply E after
W_K, as `MultiHead` with a `LearnedProjection` does, which allows one projection per head; here all heads share E and F.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.nn.builders import Fit, LearnedProjection
from headwise.nn.multihead import MultiHead
from headwise.operators.linear.projected import projected
from headwise.operators.masks import Mask
from headwise.shapes import autocasting, no_empty_axis, same_kind, truth_values


@final
class LinformerAttention(nn.Module):
    """Self-attention `layer(x)` for x (*batch, n, width) with learned E and F (rank, length); `shared` makes F = E.

    `fit` determines E for other lengths as in `LearnedProjection`; the other options are those of `MultiHead`.

    >>> import torch
    >>> LinformerAttention(16, 2, length=12, rank=4)(torch.randn(1, 10, 16)).shape
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
        """`key_mask` (*batch, n), True = attend; outputs there equal those of the sequence without padding."""
        owner = "LinformerAttention"
        truth_values(owner, causal=causal)
        if causal:
            raise UnsupportedError(
                "LinformerAttention: E mixes positions, so queries would attend to later keys; use MultiHead with "
                "LearnedBlocks(projected_blocks, ...)"
            )
        no_empty_axis(owner, x=x)
        same_kind(owner, x=x)
        if not autocasting(x.device):
            same_kind(owner, x=x, weight=self.attend.query.weight)
        learned, n = self.projection, x.shape[-2]
        if key_mask is not None:
            key_mask = Mask.checked(owner, n, n, key_mask=key_mask, batch=x.shape[:-2], device=x.device).key_mask
        context = x if key_mask is None else x.masked_fill(~key_mask.unsqueeze(-1), 0)
        keys = learned.fitted(learned.e, n).apply(context)
        values = keys if learned.f is None else learned.fitted(learned.f, n).apply(context)
        return self.attend(x, (keys, values))
