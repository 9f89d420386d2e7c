"""P = H L, H = softmax over features of s Q (rows sum to 1), L = softmax over keys of s K^T (rows sum to 1): O(n k d).

Efficient attention, Shen et al. 2018 (arXiv:1812.01243), which has s = 1; with s = 1/sqrt(k) it is the double softmax
of Verma, "Revisiting Linformer with a modified self-attention", with E = F = I.  It does not approximate softmax
attention: it is another operator of the same kind, to train with or to fit to a head.

Causal, the softmax over keys has another normaliser for every query:

    P_ij = sum_c H_ic exp(s k_jc) / sum_(j' <= i) exp(s k_j'c)   for j <= i

so the means are running sums, carried from one block of positions to the next, and inside a block the weights are
formed: O(n k d + n b (k + d)) for blocks of b, as in chunked linear attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators._kernels import autograd_functions, limits, native
from headwise.operators._kernels.double_softmax import double_softmax, double_softmax_adjoint
from headwise.operators._kernels.key_patterns import two_batch_axes
from headwise.operators._kernels.prefix_sums import (
    Blocks,
    CompiledPrefixSoftmax,
    blocked,
    blocked_absence,
    rises_little,
)
from headwise.operators._kernels.queries_keys import QueriesKeys, QueryKeyOperator
from headwise.operators.claims import Claim, weights_claim
from headwise.operators.mask_support import CAUSAL, KEY_MASK, not_exported, supports
from headwise.shapes import filled, symbolic


@final
@dataclass(frozen=True, eq=False)
class Efficient(QueryKeyOperator):
    """(P v)_i = sum_c H_ic mean_c(v), mean_c the average of v over the keys weighted by exp(s k_jc).

    Rows are stochastic unless every key is masked.  Real rows of a padded sequence equal those of the shorter one.
    """

    qk: QueriesKeys

    @property
    def claims(self) -> frozenset[Claim]:
        return weights_claim(stochastic=not self.qk.mask.has_empty_rows())

    def apply(self, v: Tensor) -> Tensor:
        return double_softmax(self.qk, self.qk.k, v, self.qk.key_mask)

    def adjoint(self, u: Tensor) -> Tensor:
        return double_softmax_adjoint(self.qk, self.qk.k, u, self.qk.key_mask)

    def cost(self, d: int) -> Cost:
        k, rows = self.qk.k.shape[-1], self.qk.m + self.qk.n
        return Cost(rows * k * d, rows * k + k * d, 2).times(self.qk.batch.numel())


@final
@dataclass(frozen=True, eq=False)
class EfficientCausal(QueryKeyOperator):
    """Query i attends to keys j <= i + n - m.  A query that attends to no key gives a row of zeros."""

    qk: QueriesKeys

    @property
    def claims(self) -> frozenset[Claim]:
        return weights_claim(stochastic=not self.qk.mask.has_empty_rows(), causal=True)

    def apply(self, v: Tensor) -> Tensor:
        qk = self.qk
        if not (qk.q.dtype == qk.k.dtype == v.dtype and native.usable(qk.q, qk.k, v, qk.key_mask)):
            return self._by_blocks(v)
        batch = torch.broadcast_shapes(qk.batch, v.shape[:-2])
        tensors = [two_batch_axes(x, batch) for x in (qk.q, qk.k, v)]
        if qk.key_mask is not None:
            tensors.append(two_batch_axes(qk.key_mask, batch, trailing=1))
        out = autograd_functions.run(CompiledPrefixSoftmax(qk.scale, self._plain), *tensors)
        return out.reshape(*batch, *out.shape[-2:])

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        """What the kernel computes, from torch's operations."""
        key_mask = replace(self.qk.mask, key_mask=mask[0] if mask else None)
        return EfficientCausal(replace(self.qk, q=q, k=key_mask.hide(k), mask=key_mask))._by_blocks(v)

    def _by_blocks(self, v: Tensor) -> Tensor:
        m, n = self.qk.m, self.qk.n
        compute = torch.promote_types(v.dtype, torch.float32)
        blocks = self.blocks(compute)
        block = blocks.keys.shape[-2]
        x = blocked(self.qk.mask.hide(v.to(compute)), block)
        # queries sit at the last positions: zeros before them; those before the first key attend to nothing
        features = torch.softmax(self.qk.q.to(compute) * self.qk.scale, dim=-1)[..., max(0, m - n) :, :]
        features = blocked(filled(features, (0, 0, max(0, n - m), 0)), block)
        out = blocks.attend(features, x, x).flatten(-3, -2)[..., max(0, n - m) : n, :]
        return filled(out, (0, 0, max(0, m - n), 0)).to(v.dtype)

    def cost(self, d: int) -> Cost:
        """States read and written, and the weights inside blocks, of which half are hidden."""
        block, count = self._sizes()
        k = self.qk.k.shape[-1]
        work = count * block * (2 * k * d + block * (k + d))
        return Cost(work, count * (2 * k * d + block * (block + 4 * k)), count).times(self.qk.batch.numel())

    def adjoint_cost(self, d: int) -> Cost:
        """The derivative of `apply`: once forward, and back through all but the weights inside blocks."""
        block, count = self._sizes()
        k = self.qk.k.shape[-1]
        back = Cost(count * block * (2 * k * d + block * d), count * 2 * k * d, count)
        return self.cost(d) + back.times(self.qk.batch.numel())

    def blocks(self, dtype: torch.dtype) -> Blocks:
        """Running sums in which every block leaves all its keys to later ones."""
        block, _ = self._sizes()
        keys = blocked(self.qk.k.to(dtype) * self.qk.scale, block)
        whole = self.qk.key_mask is None and self.qk.n % block == 0
        hidden = None if whole else blocked_absence(self.qk.key_mask, self.qk.n, block, keys.device)
        return Blocks(keys, hidden, keys, hidden)

    def _sizes(self) -> tuple[int, int]:
        block = min(limits.PREFIX_BLOCK, self.qk.n)
        return block, -(-self.qk.n // block)


@supports(CAUSAL, KEY_MASK)
def efficient(
    q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = False, key_mask: Tensor | None = None
) -> Efficient | EfficientCausal:
    """P = softmax_features(scale q) softmax_keys(scale k)^T; scale 1/sqrt(k) by default, key_mask True = attend.

    Real rows of a padded sequence equal those of the shorter one; causal, wherever the padding is.

    >>> P = efficient(torch.zeros(2, 4), torch.zeros(3, 4))
    >>> P(torch.tensor([[3.0], [0.0], [0.0]])).flatten().tolist()
    [1.0, 1.0]
    >>> efficient(torch.zeros(3, 2), torch.zeros(3, 2), causal=True).dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    owner = "EfficientCausal" if causal else "Efficient"
    qk = QueriesKeys.checked(owner, q, k, scale=scale, causal=causal, key_mask=key_mask)
    if not causal:
        return Efficient(qk)
    if symbolic(qk.n):
        raise not_exported("efficient, causal", "its blocks are cut for one length")
    operator = EfficientCausal(qk)
    if not rises_little(qk.k, qk.scale):
        operator.blocks(torch.promote_types(k.dtype, torch.float32)).check(owner)
    return operator
