"""P_ij = exp(s q_i . k_j) / Z_i for j near i, sum_t exp(s q_i . a_t + c_t) exp(s b_t . k_j) / Z_i for all others.

Near are the keys of the query's own block, of the blocks beside it, and the first few; far keys are seen through r
learned features a, b, c (r x k, r x k, r), and Z_i is one normaliser for both.  exp(q . k) as a short sum of products
of positive features is Choromanski et al. 2020 (Performer), learned to imitate a head Zhang et al. 2024 (Hedgehog,
LoLCATs).  Here every key is either near or far, never both, so a head that is local needs nothing from the features
and one that looks everywhere nothing from the window.  The sums over far keys are running sums over blocks, from the
left and (unless causal) from the right.  O(n (block + r) (k + d)), no tensor grows with n^2, and nothing learned
depends on n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.blocks import NEVER, Piece, Union
from headwise.operators.claims import Claim
from headwise.operators.pair import Pair, pair, self_attention
from headwise.operators.scores import WIDEST
from headwise.operators.tiles import Tiles
from headwise.shapes import all_finite, broadcast_batch, broadcasts_to, same_axis


@final
@dataclass(frozen=True, eq=False)
class NearFar(AttentionOperator):
    """Sums over far keys are taken when P is applied; until then it is q, k and the features."""

    both: Pair
    a: Tensor  # (*batch, r, k)
    b: Tensor  # (*batch, r, k)
    c: Tensor  # (*batch, r)
    block: int
    first: int
    causal: bool

    @property
    def shape(self) -> torch.Size:
        features = torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2], self.c.shape[:-1])
        return torch.Size((*torch.broadcast_shapes(self.both.batch, features), self.both.n, self.both.n))

    @property
    def blocks(self) -> int:
        return -(-(self.both.n - self.first) // self.block)

    @property
    def like(self) -> Tensor:
        return self.both.q

    @property
    def claims(self) -> frozenset[Claim]:
        keep = self.both.keep
        # without padding a query sees itself; with it, the first key, which has to be there
        sees = keep is None or (self.first > 0 and bool(keep[..., 0].all()))
        promised = {Claim.NONNEGATIVE} | ({Claim.STOCHASTIC} if sees else set())
        return frozenset(promised | {Claim.CAUSAL} if self.causal else promised)

    def apply(self, v: Tensor) -> Tensor:
        far = self._far()
        batch = torch.broadcast_shapes(self.shape[:-2], v.shape[:-2])
        rows = [x.expand(*batch, *x.shape[-2:]) for x in (self._means(far, v).to(v.dtype), v)]
        return self._union(far).apply(torch.cat(rows, dim=-2))

    def adjoint(self, u: Tensor) -> Tensor:
        far, slots = self._far(), self.blocks * self.a.shape[-2]
        out = self._union(far).adjoint(u)
        rest = out[..., slots:, :]
        pull = torch.func.vjp(lambda v: self._means(far, v), torch.zeros_like(rest))[1]
        return rest + pull(out[..., :slots, :].to(far.weights.dtype))[0].to(u.dtype)

    def cost(self, d: int) -> Cost:
        n, r, k = self.blocks * self.block, self.a.shape[-2], self.a.shape[-1]
        features = Cost(n * r * (k + d), n * r + 2 * self.blocks * r * d, 2).times(self.shape[:-2].numel())
        work = sum(piece.multiply_adds(w) for piece in self._pieces() for w in _widths(k + 1 + self._padded, d))
        return features + Cost(work, self.both.n * (max(k, d) + 2)).times(self.shape[:-2].numel())

    def adjoint_cost(self, d: int) -> Cost:
        n, r = self.blocks * self.block, self.a.shape[-2]
        return self.cost(d) + Cost(n * r * d).times(self.shape[:-2].numel())  # a vjp runs forward first

    @property
    def _padded(self) -> bool:
        return self.both.keep is not None

    def _pieces(self) -> tuple[Piece, ...]:
        return _pieces(self.both.n, self.block, self.first, self.blocks, self.a.shape[-2], self.causal, self.a.device)

    def _union(self, far: Far) -> Union:
        """One row of keys: r slots for each block, then the n keys; a last column holds the logarithms of masses."""
        bias = (far.masses() + self.c.unsqueeze(-2)).clamp(min=NEVER) / self.both.scale  # (*batch, blocks, r)
        batch = torch.broadcast_shapes(self.shape[:-2], bias.shape[:-2])
        a, k, q = (x.to(bias.dtype) for x in (self.a, self.both.k, self.both.q))  # half precision has no NEVER
        a = a.unsqueeze(-3).expand(*batch, *bias.shape[-2:], a.shape[-1])
        slots = torch.cat([a, bias.expand(a.shape[:-1]).unsqueeze(-1)], dim=-1).flatten(-3, -2)
        keys = F.pad(k, (0, 1))
        keys = torch.cat([slots, keys.expand(*batch, *keys.shape[-2:])], dim=-2)
        keep = self.both.keep
        seen = None if keep is None else F.pad(keep, (slots.shape[-2], 0), value=True)
        return Union(F.pad(q, (0, 1), value=1.0), keys, self.both.scale, self._pieces(), seen)

    def _far(self) -> Far:
        dtype = torch.promote_types(self.both.k.dtype, torch.float32)
        scores = self.both.scale * (self._blocked(self.both.k).to(dtype) @ self.b.to(dtype).mT.unsqueeze(-3))
        keep = self.both.keep
        there = torch.ones(self.both.n, 1, dtype=torch.bool, device=scores.device)
        hidden = ~self._blocked(there if keep is None else keep.unsqueeze(-1))
        scores = scores.masked_fill(hidden, NEVER)
        # every block has a shift of its own, and sums over blocks are in double precision: what is small is not lost
        tops = scores.detach().amax(-2, keepdim=True)
        top = tops.amax(-3, keepdim=True)
        weights, share = (scores - tops).exp().masked_fill(hidden, 0), (tops - top).double().exp()
        sums = _elsewhere(weights.sum(-2, keepdim=True) * share, self.causal)
        return Far(weights, share, sums, top)

    def _means(self, far: Far, v: Tensor) -> Tensor:
        """Means of the far values: (*batch, n, d) -> (*batch, blocks r, d)"""
        x = v.to(far.weights.dtype)
        x = x if self.both.keep is None else x.masked_fill(~self.both.keep.unsqueeze(-1), 0)
        total = _elsewhere((far.weights.mT @ self._blocked(x)) * far.share.mT, self.causal)
        return (total / far.sums.masked_fill(far.empty, 1).mT).flatten(-3, -2).to(x.dtype)

    def _blocked(self, x: Tensor) -> Tensor:
        """(*batch, n, c) -> (*batch, blocks, block, c), without the first keys, zeros at the end."""
        x = x[..., self.first :, :]
        return F.pad(x, (0, 0, 0, self.blocks * self.block - x.shape[-2])).unflatten(-2, (self.blocks, self.block))


@final
@dataclass(frozen=True, eq=False)
class Far:
    """exp(s b . k) of every key over that of its block's top one, and their sums over the far blocks of each block."""

    weights: Tensor  # (*batch, blocks, block, r)
    share: Tensor  # (*batch, blocks, 1, r), exp(top of the block - top of all)
    sums: Tensor  # (*batch, blocks, 1, r), relative to the top of all
    top: Tensor  # (*batch, 1, 1, r)

    @property
    def empty(self) -> Tensor:
        return self.sums <= 1e-300

    def masses(self) -> Tensor:
        """log sum over far j of exp(s b . k_j): (*batch, blocks, r), NEVER where there is none."""
        logs = self.sums.masked_fill(self.empty, 1).log() + self.top
        return logs.masked_fill(self.empty, NEVER).squeeze(-2).to(self.weights.dtype)


def _elsewhere(x: Tensor, causal: bool) -> Tensor:
    """Sums of x (*batch, blocks, ...) over the blocks not beside each: those two or more before (or after)."""
    none = x.new_zeros(*x.shape[:-3], min(2, x.shape[-3]), *x.shape[-2:])
    before = torch.cat([none, x.cumsum(-3)[..., :-2, :, :]], dim=-3)
    return before if causal else before + torch.cat([none, x.flip(-3).cumsum(-3)[..., :-2, :, :]], dim=-3).flip(-3)


def _widths(k: int, d: int) -> list[int]:
    """How wide the kernel runs: as wide as keys or values, which come in parts of at most WIDEST."""
    return [max(k, min(WIDEST, d - start)) for start in range(0, d, WIDEST)]


def near_far(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    block: int,
    first: int = 0,
    scale: float | None = None,
    causal: bool = False,
    padding: Tensor | None = None,
) -> NearFar:
    """Keys of the query's block and of those beside it (causal: before it) one by one, the others through r features.

    a, b     (*batch, r, k): query and key sides of the features; c (*batch, r) their log weights
    first    so many first keys are near to every query, and as queries they see every key (causal: those before them)
    padding  boolean (*batch, n), True at real keys; where padding follows, real rows equal the shorter sequence's

    >>> q, a = torch.zeros(12, 2), torch.zeros(1, 2)  # scores are alike, and one feature with a = b = 0 is exact
    >>> near_far(q, q, a, a, torch.zeros(1), block=2).dense()[0, [0, 11]]
    tensor([0.0833, 0.0833])
    """
    both = pair("NearFar", q, k, scale=scale, padding=padding)
    n = self_attention("NearFar", both, "softmax")
    if block < 1:
        raise ShapeError(f"NearFar: block must be at least 1 (a query sees itself), but is {block}")
    if not 0 <= first < n:
        raise ShapeError(f"NearFar: first must be between 0 and n - 1 = {n - 1}, but is {first}")
    same_axis("NearFar", "k", q=q.shape[-1], a=a.shape[-1], b=b.shape[-1])
    r = same_axis("NearFar", "r", a=a.shape[-2], b=b.shape[-2], c=c.shape[-1])
    broadcast_batch("NearFar", q=both.batch, a=a.shape[:-2], b=b.shape[:-2], c=c.shape[:-1])
    broadcasts_to("NearFar", "a", a, (*both.batch, r, a.shape[-1]))
    all_finite("NearFar", a=a, b=b, c=c)
    return NearFar(both, a, b, c, block, first, causal)


def _pieces(
    n: int, block: int, first: int, blocks: int, r: int, causal: bool, device: torch.device
) -> tuple[Piece, ...]:
    """Rows are positions; columns are the slots of all blocks, then positions."""
    keys = blocks * r
    sides = (1, 0) if causal else (1, 1)  # blocks before and after

    def near(begin: int, count: int) -> Piece:
        """`count` blocks from `begin` on, each against itself and its neighbours; the last block may be short."""
        top = first + begin * block
        left, right = max(0, begin - sides[0]), min(blocks, begin + 1 + sides[1])
        rows = Tiles(top, count, block, min(block, n - top))
        start = first + left * block
        columns = Tiles(keys + start, count, block, min(n, first + right * block) - start)
        if not causal:
            return Piece(rows, columns, first=True)
        i, j = torch.arange(rows.length, device=device)[:, None], torch.arange(columns.length, device=device)
        return Piece(rows, columns, first=True, mask=j <= i + top - start)

    def far(begin: int, count: int) -> Piece:
        top = first + begin * block
        rows = Tiles(top, count, block, min(block, n - top))
        return Piece(rows, Tiles(begin * r, count, r, r), first=False)

    whole = (n - first) // block  # blocks that are not short
    inner = range(1, max(1, whole - sides[1]))  # their neighbours are whole too
    outer = [i for i in range(blocks) if i not in inner]
    pieces = [near(i, 1) for i in outer] + ([near(1, len(inner))] if len(inner) else [])
    if first:
        looking = Tiles(0, 1, 0, first)
        pieces.insert(0, Piece(looking, Tiles(keys, 1, 0, first if causal else n), first=True, causal=causal))
        pieces.append(Piece(Tiles(first, 1, 0, n - first), Tiles(keys, 1, 0, first), first=False))
    # a block has far keys if some other is two or more away
    reached = range(2, blocks) if causal else range(blocks) if blocks > 3 else [i for i in range(blocks) if i != 1]
    reached = [i for i in reached if blocks > 2]
    split = [i for i in reached if i < whole]
    runs = [(split[0], len(split))] if split and split[-1] - split[0] + 1 == len(split) else [(i, 1) for i in split]
    pieces += [far(*run) for run in runs] + [far(i, 1) for i in reached if i >= whole]
    return tuple(pieces)
