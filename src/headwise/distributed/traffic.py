"""Scalars that one rank receives: what the formulas say, and what a call really asks torch.distributed for.

    traffic(P, d, ranks)       the formula of each operator, for even, contiguous slices of whole blocks
    with CountedTraffic():     every collective, with the bytes that this rank receives from others

An all-reduce of x scalars receives 2 x (P-1)/P of them, as a ring of reduce-scatter and all-gather does, gloo's too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import singledispatch
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.distributed.hash_buckets import Copies, SortedChunks
from headwise.distributed.residue_columns import Columns, has_band
from headwise.distributed.slices import Slices
from headwise.errors import UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.compose import Product, Sum
from headwise.operators.dot_product import DotProduct
from headwise.operators.linear.efficient import Efficient, EfficientCausal
from headwise.operators.linear.factored import Factored
from headwise.operators.linear.near_far import NearFar
from headwise.operators.linear.nystrom import Nystrom
from headwise.operators.linear.projected import Projected
from headwise.operators.linear.projections import Convolution, CountSketch, Dense, Hadamard, Projection
from headwise.operators.relative.offset import Offset
from headwise.operators.relative.shift import Shift
from headwise.operators.relative.toeplitz import Toeplitz, ToeplitzSoftmax
from headwise.operators.softmax import Softmax
from headwise.operators.sparse.fixed import Fixed
from headwise.operators.sparse.hashed import Hashed
from headwise.operators.sparse.strided import Strided
from headwise.operators.sparse.window import Window
from headwise.operators.uniform import Uniform


@final
@dataclass(frozen=True)
class Traffic:
    """Scalars for each head that arrive as they are, and that are results of reductions."""

    exchanged: Fraction | int = 0
    reduced: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exchanged + other.exchanged, self.reduced + other.reduced)

    def received(self, ranks: int) -> Fraction:
        """Scalars that one of `ranks` ranks receives."""
        return Fraction(self.exchanged) + Fraction(2 * self.reduced * (ranks - 1), ranks)


@singledispatch
def traffic(operator: AttentionOperator, d: int, ranks: int) -> Traffic:
    """Of one `apply` to d columns, for one head, on the rank that receives most; without a key mask.

    Unless known better, all positions of some heads; for operators that read neither q nor k, of some columns of v.
    """
    width = _key_width(operator)
    if width is not None:
        return head_traffic(operator, d, ranks)
    return Traffic(Fraction(operator.shape[-1] * (ranks - 1), ranks**2) * 2 * d)


def head_traffic(operator: AttentionOperator, d: int, ranks: int) -> Traffic:
    """The same if q, k and v of some heads are brought together, and the result is sent back."""
    width = _key_width(operator) or 0
    return Traffic(Fraction(operator.shape[-1] * (ranks - 1), ranks**2) * 2 * (width + d))


@traffic.register
def _(operator: Softmax, d: int, ranks: int) -> Traffic:
    return Traffic(Fraction(operator.shape[-1] * (ranks - 1), ranks) * (operator.scores.k.shape[-1] + d))


@traffic.register
def _(operator: Product, d: int, ranks: int) -> Traffic:
    """Of the factors; the most that there may be if they have their maxima on different ranks."""
    return sum((traffic(factor, d, ranks) for factor in operator.factors), Traffic())


@traffic.register
def _(operator: Sum, d: int, ranks: int) -> Traffic:
    return sum((traffic(term, d, ranks) for term in operator.terms), Traffic())


@traffic.register
def _(operator: Window, d: int, ranks: int) -> Traffic:
    before, after = (operator.width - 1, 0) if operator.causal else (operator.width // 2, (operator.width - 1) // 2)
    k = operator.union.k.shape[-1]
    return Traffic(_both_sides(before, after, ranks) * (k + d)) + _leading(operator.leading, k, d, operator.causal)


@traffic.register
def _(operator: Fixed, d: int, ranks: int) -> Traffic:
    pattern, n = operator.union.pattern, operator.shape[-1]
    if pattern is None or not pattern.every:
        return Traffic()
    summaries = Fraction(operator.summaries * n * (ranks - 1), operator.block * ranks)
    return Traffic(summaries * (operator.union.k.shape[-1] + d))


@traffic.register
def _(operator: Strided, d: int, ranks: int) -> Traffic:
    n, k, near = operator.shape[-1], operator.union.k.shape[-1], has_band(operator)
    dealt, reach, most = Columns(n, operator.stride, ranks), (operator.stride - 1) * near, 0
    for rank in range(ranks):
        ((start, stop),) = Slices.even(n, ranks).segments(rank)
        both = dealt.count(rank, start, stop)  # held by the rank, and in its columns
        halo = min(start, reach) + (0 if operator.causal else min(n - stop, reach)) if stop > start else 0
        elsewhere, away = dealt.lengths[rank] - both, stop - start - both
        most = max(most, elsewhere * (2 * k + d) + away * (d + near) + halo * (k + d))
    return Traffic(most)


@traffic.register
def _(operator: Hashed, d: int, ranks: int) -> Traffic:
    """Of the rows that are in the chunks of a rank; without values of q and k, the most that there may be."""
    n, k, rounds, size = operator.shape[-1], operator.qk.k.shape[-1], operator.order_q.shape[-2], operator.chunk
    widths = (0 if operator.shared else k, k + d, d + 1)  # of queries, of keys with values, of rows that come back
    held = Slices.even(n, ranks)
    if operator.order_q.is_meta:
        own, others = rounds * size * Slices.even(math.ceil(n / size), ranks).lengths[0], n - held.lengths[-1]
        most = (min(own, others), min(own + rounds * size, others), held.lengths[0] * min(rounds, ranks - 1))
        return Traffic(sum(count * width for count, width in zip(most, widths, strict=True)))
    order_q, order_k = (x.reshape(-1, rounds, n) for x in (operator.order_q, operator.order_k))
    chunks = SortedChunks(order_q, order_k, size, ranks)
    flat = Copies(held, len(chunks.order_q))
    owners = [[flat.locate(rows(rank))[0] for rank in range(ranks)] for rows in (chunks.queries, chunks.keys)]
    received = []
    for rank in range(ranks):
        queries, keys = (int((owner[rank] != rank).sum()) for owner in owners)
        back = sum(int((owner == rank).sum()) for other, owner in enumerate(owners[0]) if other != rank)
        received.append(sum(count * width for count, width in zip((queries, keys, back), widths, strict=True)))
    return Traffic(Fraction(max(received), flat.copies))


@traffic.register
def _(operator: Efficient, d: int, ranks: int) -> Traffic:
    return Traffic(reduced=operator.qk.k.shape[-1] * (d + 2))


@traffic.register
def _(operator: EfficientCausal, d: int, ranks: int) -> Traffic:
    return Traffic((ranks - 1) * operator.qk.k.shape[-1] * (d + 1))


@traffic.register
def _(operator: DotProduct, d: int, ranks: int) -> Traffic:
    return _state(operator.k.shape[-1] * d, operator.mask.causal, ranks)


@traffic.register
def _(operator: Uniform, d: int, ranks: int) -> Traffic:
    return _state(d, operator.mask.causal, ranks)


@traffic.register
def _(operator: Projected, d: int, ranks: int) -> Traffic:
    e, f = operator.short.e, operator.short.f
    if isinstance(e, Hadamard) or isinstance(f, Hadamard):
        return head_traffic(operator, d, ranks)
    return _slots(e, operator.qk.k.shape[-1], ranks) + _slots(f, d, ranks)


@traffic.register
def _(operator: Factored, d: int, ranks: int) -> Traffic:
    e, f, k = operator.short.e, operator.short.f, operator.qk.k.shape[-1]
    if isinstance(e, Hadamard) or isinstance(f, Hadamard):
        return head_traffic(operator, d, ranks)
    if f is e and not isinstance(e, (Dense, CountSketch)):
        return Traffic(reduced=k * (d + 2))
    return _slots(e, k, ranks) + _slots(f, d, ranks)


@traffic.register
def _(operator: Nystrom, d: int, ranks: int) -> Traffic:
    r, k = operator.landmark_k.shape[-2], operator.qk.k.shape[-1]
    parts = (ranks - 1) * max(1, Fraction(r, ranks))
    return Traffic(2 * parts * k, r * (d + 2))


@traffic.register
def _(operator: NearFar, d: int, ranks: int) -> Traffic:
    k, r = operator.qk.k.shape[-1], operator.b.shape[-2]
    sides = _both_sides(operator.block, 0 if operator.causal else operator.block, ranks)
    pieces = 2 if operator.causal or ranks == 2 else 3
    near = Traffic(sides * (k + d) + (ranks - 1) * pieces * r * (d + 1))
    return near + _leading(operator.leading, k, d, operator.causal)


@traffic.register
def _(operator: Shift, d: int, ranks: int) -> Traffic:
    return _chosen(operator.sources(), operator.shape[-1], d, ranks)


@traffic.register
def _(operator: Offset, d: int, ranks: int) -> Traffic:
    return _chosen(operator.index, operator.n, d, ranks)


@traffic.register
def _(operator: Toeplitz, d: int, ranks: int) -> Traffic:
    return _reach(operator.weights != 0, operator.m, operator.n, d, ranks)


@traffic.register
def _(operator: ToeplitzSoftmax, d: int, ranks: int) -> Traffic:
    return _reach(operator.logits > -torch.inf, operator.mask.m, operator.mask.n, d, ranks)


def _chosen(sources: Tensor, n: int, d: int, ranks: int) -> Traffic:
    """d for each query whose key is on another rank."""
    queries, keys = Slices.even(len(sources), ranks), Slices.even(n, ranks)
    wanted = [sources[queries.positions(rank)] for rank in range(ranks)]
    return Traffic(max(int((keys.locate(w[w >= 0])[0] != rank).sum()) for rank, w in enumerate(wanted)) * d)


def _reach(visible: Tensor, m: int, n: int, d: int, ranks: int) -> Traffic:
    """d for each of the keys before and after a slice that some weight reaches; columns if those are fewer."""
    at = visible.reshape(-1, visible.shape[-1]).any(0).nonzero().flatten() - (m - 1)
    before, after = max(0, -int(at.min())), max(0, int(at.max()))
    columns = Fraction(2 * n * (ranks - 1), ranks**2)
    return Traffic((_both_sides(before, after, ranks) if before + after <= columns else columns) * d)


def _leading(leading: int, k: int, d: int, causal: bool) -> Traffic:
    """Leading keys and values; as queries that attend to all keys, they too, and a sum over the ranks."""
    keys = Traffic(leading * (k + d))
    return keys if causal or not leading else keys + Traffic(leading * k, leading * (d + 2))


def _state(scalars: int, causal: bool, ranks: int) -> Traffic:
    return Traffic((ranks - 1) * scalars) if causal else Traffic(reduced=scalars)


def _slots(projection: Projection, width: int, ranks: int) -> Traffic:
    """All slots: sums over the ranks, or the parts of each; a slot that lies on two ranks has two parts."""
    if isinstance(projection, (Dense, CountSketch)):
        return Traffic(reduced=projection.slots * width)
    overlap = 0
    if isinstance(projection, Convolution):
        overlap = -(-(projection.weight.shape[0] - projection.stride) // projection.stride)
    return Traffic((ranks - 1) * (max(1, Fraction(projection.slots, ranks)) + overlap) * width)


def _both_sides(before: int, after: int, ranks: int) -> int:
    """What a rank in the middle needs from both sides; of two ranks, each has one side."""
    return before + after if ranks > 2 else max(before, after)


def _key_width(operator: AttentionOperator) -> int | None:
    """Of an operator that reads q and k."""
    if isinstance(operator, (Product, Sum)):
        parts = operator.factors if isinstance(operator, Product) else operator.terms
        return next((width for part in parts if (width := _key_width(part)) is not None), None)
    for name in ("qk", "union", "scores", "k"):
        part = getattr(operator, name, None)
        keys = part if isinstance(part, Tensor) else getattr(part, "k", None)
        if isinstance(keys, Tensor):
            return keys.shape[-1]
    return None


COLLECTIVES = {"c10d::alltoall_base_": "all_to_all", "c10d::allgather_": "all_gather", "c10d::allreduce_": "all_reduce"}
"""Those that are counted, as torch dispatches them."""


class CountedTraffic(TorchDispatchMode):
    """Bytes that this rank receives from other ranks inside a `with` block, by collective and dtype, and its calls.

    Calls that say which slices there are (int64) are counted like all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[tuple[str, torch.dtype]] = Counter()
        self.calls: Counter[str] = Counter()

    def bytes(self, *dtypes: torch.dtype) -> int:
        """Of these dtypes, or of all."""
        return sum(size for (_, dtype), size in self.received.items() if not dtypes or dtype in dtypes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "_schema", None)
        name = "" if name is None else name.name
        kind = COLLECTIVES.get(name, "")
        self.calls.update([kind] if kind else [])
        if kind == "all_to_all":
            out, given, group, receive, _ = args[:5]
            size, rank = _size_and_rank(group)
            rows = list(receive) or [out.shape[0] // size] * size
            width = out.shape[1:].numel() if given.dim() > 1 else 1
            self.received[kind, out.dtype] += (sum(rows) - rows[rank]) * width * out.element_size()
        elif kind == "all_gather":
            (given,) = args[1]
            size, _ = _size_and_rank(args[2])
            self.received[kind, given.dtype] += (size - 1) * given.numel() * given.element_size()
        elif kind == "all_reduce":
            (given,) = args[0]
            size, _ = _size_and_rank(args[1])
            self.received[kind, given.dtype] += 2 * given.numel() * given.element_size() * (size - 1) // size
        elif name.startswith("c10d::"):
            raise UnsupportedError(f"CountedTraffic: {name} is not counted; use a profiler")
        return func(*args, **(kwargs or {}))


def _size_and_rank(group: Any) -> tuple[int, int]:
    group = dist.ProcessGroup.unbox(group)
    return group.size(), group.rank()
