"""Any builder, with q, k and v the slices of a sequence that other processes hold the rest of.

    build = sequence_parallel(softmax)         # or partial(window, width=129), LearnedProjection(...), a lambda
    out = build(q, k, causal=True)(v)          # this rank's rows of P v

The builder is first called with q and k of the whole sequence on the meta device, where nothing is computed.  The
operator that it returns says what has to be exchanged (`exchanges`); its parameters are the real ones, with gradients.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.cost import Cost
from headwise.distributed import (
    by_position,
    far_features,
    fetched_keys,
    hash_buckets,
    residue_columns,
    running_states,
    shared_slots,
)
from headwise.distributed.collectives import Ranks
from headwise.distributed.exchanges import (
    Call,
    NoExchange,
    by_heads,
    by_positions,
    columns,
    local_rows,
    sequence_mask,
    tensors_in,
)
from headwise.distributed.slices import Slices
from headwise.distributed.traffic import head_traffic, traffic
from headwise.errors import DtypeError, HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.nystrom import Nystrom
from headwise.operators.mask_support import supported
from headwise.operators.masks import share_between_heads
from headwise.operators.softmax import Softmax
from headwise.operators.sparse.hashed import Hashed
from headwise.shapes import are_tensors, broadcast_batch, same_axis, same_kind, shown, truth_values

REGISTERED = (by_position, far_features, fetched_keys, hash_buckets, residue_columns, running_states, shared_slots)
"""Importing these teaches `local_rows` their operators."""

Exchange = Literal["cheapest", "heads", "ring"]


def sequence_parallel(
    build: Callable[..., AttentionOperator],
    group: dist.ProcessGroup | None = None,
    *,
    zigzag: bool = False,
    exchange: Exchange = "cheapest",
) -> SequenceParallel:
    """`build` for sequences that the ranks of `group` (by default all processes) hold slices of.

    The result takes q (*batch, m, k), k (*batch, n, k), `causal` and `key_mask` (*batch, n), all of this rank's
    positions, and returns an operator on its n rows of v.  Slices are contiguous and in the order of the ranks, of any
    lengths, also empty; `zigzag` says that they are those of `Slices(lengths, zigzag=True)`.

    exchange  "cheapest", or for softmax "ring" or "heads"; "heads" for any builder

    Tensors of a builder (parameters, projections) are the same on all ranks.  Their gradients, like those of all other
    weights of the model, are parts: sum them over the ranks, where the loss is the sum of the losses of all ranks.
    """
    if not callable(build):
        raise InputError(f"sequence_parallel: build must be the builder of an operator, but is {shown(build)}")
    truth_values("sequence_parallel", zigzag=zigzag)
    if exchange not in ("cheapest", "heads", "ring"):
        raise InputError(f"sequence_parallel: exchange must be 'cheapest', 'heads' or 'ring', but is {shown(exchange)}")
    return SequenceParallel(build, Ranks.of(group), zigzag, exchange)


class SequenceParallel(nn.Module):
    """A builder on slices, made by `sequence_parallel`; parameters of the builder inside are its own."""

    def __init__(self, build: Callable[..., AttentionOperator], ranks: Ranks, zigzag: bool, exchange: Exchange) -> None:
        super().__init__()
        self.build, self.ranks, self.zigzag = build, ranks, zigzag
        self.exchange: Exchange = exchange
        self.supports = supported(build)
        self.by_dot_product = build.__name__ == "softmax" if hasattr(build, "__name__") else False
        self.agreed: dict[tuple[object, ...], bool] = {}  # calls that all ranks agreed on

    def forward(
        self, q: Tensor, k: Tensor, *, causal: bool = False, key_mask: Tensor | None = None, **others: Any
    ) -> ShardedOperator:
        refused = tuple(name for name, x in others.items() if x is not None and x is not False)
        return ShardedOperator(self, q, k, causal, key_mask, refused)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return SequenceParallel(copy.deepcopy(self.build, memo), self.ranks, self.zigzag, self.exchange)

    def extra_repr(self) -> str:
        build = "" if isinstance(self.build, nn.Module) else f"{getattr(self.build, '__name__', self.build)}, "
        return f"{build}rank {self.ranks.rank} of {self.ranks.size}"


@final
@dataclass(frozen=True, eq=False)
class ShardedOperator(AttentionOperator):
    """The rows of P of this rank's queries, applied to values of which each rank holds those of its keys.

    Nothing is sent before it is applied.  All ranks apply it, in the same order as their other operators.
    """

    builder: SequenceParallel
    q: Tensor
    k: Tensor
    causal: bool
    key_mask: Tensor | None
    others: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """(*batch, m, n) with the m queries and n keys of this rank."""
        like = torch.empty(*self.k.shape[:-2], 1, 1, device="meta")  # grouped queries, without repeating k
        keys = repeat_heads(like, self.q, "sequence_parallel")
        batch = broadcast_batch("sequence_parallel", q=self.q.shape[:-2], k=keys.shape[:-2])
        return torch.Size((*batch, self.q.shape[-2], self.k.shape[-2]))

    @property
    def like(self) -> Tensor:
        return self.q

    def __call__(self, v: Tensor) -> Tensor:
        return self.apply(v)  # an empty slice is allowed, and what is wrong on one rank must be said on all

    def apply(self, v: Tensor) -> Tensor:
        call, said = self._meet(v)
        operator = self._probed(call, said)
        if call.ranks.size == 1:
            return self._build(self.q, self.k, call.key_mask).apply(v)
        if operator is None or self.builder.exchange == "heads" or self._heads_are_cheaper(operator, call, v):
            return self._by_heads(call, v)
        if self.builder.exchange == "ring" and not isinstance(operator, Softmax):
            raise UnsupportedError(f"sequence_parallel: there is no ring for {type(operator).__name__}, only softmax")
        reads = any(x.is_meta and x.dtype.is_floating_point for x in tensors_in(operator))
        if not reads and any(x.is_meta for x in tensors_in(operator)):  # positions made on the device of q
            q, k = (x.new_zeros(1).expand(y.shape) for x, y in zip((self.q, self.k), self._whole(call), strict=True))
            operator = self._build(q, k, sequence_mask(call))
        try:
            return local_rows(operator, call, v)
        except NoExchange:
            return self._by_heads(call, v) if reads else columns(operator, call, v)

    def adjoint(self, u: Tensor) -> Tensor:
        """This rank's rows of P^T u, from its rows of u; no rank needs v."""
        with torch.enable_grad():
            v = u.new_zeros(*u.shape[:-2], self.k.shape[-2], u.shape[-1]).requires_grad_()
            return torch.autograd.grad(self.apply(v), v, u)[0]

    def dense(self, like: Tensor | None = None) -> Tensor:
        raise UnsupportedError(
            "sequence_parallel: the entries of P are spread over the ranks; use one process for them"
        )

    def cost(self, d: int) -> Cost:
        """Of one `apply` on all ranks together; every rank must ask for it."""
        call, said = self._meet(self.k.new_zeros(*self.k.shape[:-1], d))
        operator = self._probed(call, said)
        return self._build(*self._whole(call)).cost(d) if operator is None else operator.cost(d)

    def _meet(self, v: Tensor) -> tuple[Call, str]:
        """The lengths of all slices, once every rank has said that it makes the same call, and what it said."""
        ranks, problem = self.builder.ranks, None
        try:
            self._checked(v)
            said = f"{_named(self.builder.build)} of {_kind(self.q)}, {_kind(self.k)}, {_kind(v)}, " + (
                f"causal={self.causal}, zigzag={self.builder.zigzag}, exchange={self.builder.exchange!r}, key_mask="
                f"{None if self.key_mask is None else tuple(self.key_mask.shape[:-1])}"
            )
        except HeadwiseError as error:
            problem, said = error, f"an error: {error}"
        lengths = _agree(said, ranks, *(x if problem is None else None for x in (self.q, self.k)))
        if problem is not None:
            raise problem
        m, n = (Slices(tuple(column), self.builder.zigzag) for column in zip(*lengths, strict=True))
        if not m.n or not n.n:
            raise ShapeError(f"sequence_parallel: {m.n} queries and {n.n} keys on all ranks together have no attention")
        mask = None if self.key_mask is None else share_between_heads(self.key_mask, self.shape[:-2])
        return Call(ranks, m, n, self.q, self.k, mask), said

    def _whole(self, call: Call) -> tuple[Tensor, Tensor]:
        """q and k of the whole sequence, without values."""
        return tuple(
            torch.empty(*x.shape[:-2], held.n, x.shape[-1], dtype=x.dtype, device="meta")
            for x, held in ((self.q, call.queries), (self.k, call.keys))
        )  # type: ignore[return-value]

    def _build(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> AttentionOperator:
        masks: dict[str, Any] = {"causal": True} if self.causal else {}
        masks |= {} if key_mask is None else {"key_mask": key_mask}
        with _WithoutValues() if q.is_meta else contextlib.nullcontext():
            operator = self.builder.build(q, k, **masks)
        if not isinstance(operator, AttentionOperator):
            raise InputError(f"sequence_parallel: build must return an operator, but returns {shown(operator)}")
        return operator

    def _probed(self, call: Call, said: str) -> AttentionOperator | None:
        """The operator of the whole sequence; None if it is not known how it reads q and k."""
        problem = operator = None
        q, k = self._whole(call)
        masks: list[Callable[[], Tensor | None]] = [lambda: None]
        if (mask := call.key_mask) is not None:
            masks = [lambda: q.new_empty(*mask.shape[:-1], call.keys.n, dtype=torch.bool), lambda: sequence_mask(call)]
        for make_mask in masks:
            try:
                operator = self._build(q, k, make_mask())
                break
            except (DtypeError, RuntimeError):  # tensors of the builder, a bias or rotations, are not on meta
                continue
            except HeadwiseError as error:
                problem = error
                break
        signature = (said, call.queries, call.keys)
        if signature not in self.builder.agreed:
            _agree(f"an error: {problem}" if problem else _described(operator), call.ranks.introduced())
            if problem is None:
                self.builder.agreed[signature] = self._is_faithful(operator, q, k)
        if problem is not None:
            raise problem
        if _draws_rotations(operator):
            raise UnsupportedError(
                "sequence_parallel: hashed draws other rotations on every rank; pass the same `rotations` on all"
            )
        return operator if self.builder.agreed[signature] else None

    def _is_faithful(self, operator: AttentionOperator | None, q: Tensor, k: Tensor) -> bool:
        """Whether the operator reads q and k as they are; a masked or repeated k is not recognised, so without."""
        if operator is None:
            return False
        if self.key_mask is not None or k.shape[:-2] != q.shape[:-2]:
            k = repeat_heads(k, q, "sequence_parallel")
            operator = self._build(q, k)
        return _reads_only(operator, q, k)

    def _heads_are_cheaper(self, operator: AttentionOperator, call: Call, v: Tensor) -> bool:
        """By the formulas of `traffic`, if every rank would have as many heads, and no head its own parameters."""
        size, heads = call.ranks.size, torch.broadcast_shapes(self.shape[:-2], v.shape[:-2])[-1:].numel()
        # rotations are those of all heads
        held = [x for x in tensors_in(operator) if not isinstance(operator, Hashed) or x is not operator.rotations]
        reads = any(x.is_meta and x.dtype.is_floating_point for x in held)
        if self.builder.exchange == "ring" or heads % size or not reads or not all(x.is_meta for x in held):
            return False
        own, by_heads = (formula(operator, v.shape[-1], size).received(size) for formula in (traffic, head_traffic))
        return own > by_heads

    def _by_heads(self, call: Call, v: Tensor) -> Tensor:
        """All positions of some heads: 4 d N (P-1)/P^2 scalars for each head (Jacobs et al. 2023, Ulysses)."""
        size, rank = call.ranks.size, call.ranks.rank
        batch = torch.broadcast_shapes(self.shape[:-2], v.shape[:-2])
        heads = batch[-1] if batch else 1
        if heads < size:
            raise UnsupportedError(
                f"sequence_parallel: {_named(self.builder.build)} is computed with all positions of some heads on "
                f"each rank, but there are {heads} heads for {size} ranks; use fewer ranks, or softmax, window or "
                "efficient, which need no heads"
            )
        groups = self.k.shape[-3] if self.k.dim() > 2 else 1
        k = self.k if groups % size == 0 else repeat_heads(self.k, self.q, "sequence_parallel")
        q, k, v = (
            x if x.dim() > 2 and x.shape[-3] not in (1,) else x.expand(*x.shape[:-3], heads, *x.shape[-2:])
            for x in (self.q, k, v)
        )
        whole_q = by_heads(q, -3, call.queries, call.ranks)
        whole_k, whole_v = (by_heads(x, -3, call.keys, call.ranks) for x in (k, v))
        mask = sequence_mask(call)
        if mask is not None and mask.dim() > 1 and mask.shape[-2] == heads > 1:
            mask = Slices.even(heads, size).cut(mask, rank)
        try:
            out = self._build(whole_q, whole_k, mask).apply(whole_v)
            same_axis("sequence_parallel", "h", q=whole_q.shape[-3], out=out.shape[-3])
        except (HeadwiseError, RuntimeError) as error:
            raise UnsupportedError(
                f"sequence_parallel: {_named(self.builder.build)} is computed with all positions of some of the "
                f"{heads} heads on each rank, which fails, as it must if heads have parameters of their own: {error}"
            ) from error
        return by_positions(out, -3, heads, call.queries, call.ranks)

    def _checked(self, v: Tensor) -> None:
        owner = "sequence_parallel"
        are_tensors(owner, q=self.q, k=self.k, v=v)
        truth_values(owner, causal=self.causal)
        if self.others:
            raise UnsupportedError(
                f"{owner}: does not support {', '.join(self.others)}, which would have an entry for each pair of "
                "positions; use causal and key_mask"
            )
        for name, x in (("q", self.q), ("k", self.k), ("v", v)):
            if x.dim() < 2 or 0 in (*x.shape[:-2], x.shape[-1]):
                raise ShapeError(f"{owner}: {name} must be (*batch, rows, width), but has shape {tuple(x.shape)}")
        same_axis(owner, "k", q=self.q.shape[-1], k=self.k.shape[-1])
        same_axis(owner, "n", k=self.k.shape[-2], v=v.shape[-2])
        same_kind(owner, q=self.q, k=self.k, v=v)
        if self.key_mask is not None:
            are_tensors(owner, key_mask=self.key_mask)
            if self.key_mask.dtype != torch.bool or self.key_mask.shape[-1:] != (self.k.shape[-2],):
                raise ShapeError(
                    f"{owner}: key_mask must be boolean (*batch, n) with this rank's n = {self.k.shape[-2]} keys, but "
                    f"is {self.key_mask.dtype} with shape {tuple(self.key_mask.shape)}"
                )
        broadcast_batch(owner, operator=self.shape[:-2], v=v.shape[:-2])


class _WithoutValues(TorchDispatchMode):
    """RuntimeError where values would be made from none: torch takes indices on meta, and returns garbage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(x.is_meta for x in given) and not all(x.is_meta for x in made):
            raise RuntimeError(f"{func}: a tensor with values is indexed by one on meta, which has none")
        return out


def _agree(said: str, ranks: Ranks, *tensors: Tensor | None) -> list[list[int]]:
    """The rows of the tensors on every rank, if all ranks say the same; otherwise all raise, each naming the others.

    8 bytes from every other rank, and 8 for each tensor.
    """
    device = next((x.device for x in tensors if x is not None), ranks.device)
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")
    rows = [0 if x is None or x.dim() < 2 else x.shape[-2] for x in tensors]
    own = torch.tensor([digest, *rows], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(ranks.size)]
    ranks.call(dist.all_gather, everyone, own)
    found = [x.tolist() for x in everyone]
    if len({digest for digest, *_ in found}) > 1:
        sayings: list[Any] = [None] * ranks.size
        ranks.call(dist.all_gather_object, sayings, said)
        if not said.startswith("an error"):
            other = next(rank for rank, saying in enumerate(sayings) if saying != said)
            raise InputError(
                f"sequence_parallel: all ranks must make the same call, but rank {ranks.rank} has {said}, and rank "
                f"{other} has {sayings[other]}"
            )
    return [rows for _, *rows in found]


def _kind(x: Tensor) -> str:
    """What must be the same on all ranks: everything but the number of positions."""
    sizes = ", ".join(str(size) for size in (*x.shape[:-2], "n", x.shape[-1]))
    return f"{x.dtype} ({sizes}){' with gradient' if x.requires_grad and torch.is_grad_enabled() else ''}"


def _named(build: Any) -> str:
    """A builder by its name and the numbers it was given."""
    if hasattr(build, "func"):
        given = [*map(shown, build.args), *(f"{name}={shown(x)}" for name, x in sorted(build.keywords.items()))]
        return f"{_named(build.func)}({', '.join(given)})"
    return getattr(build, "__name__", type(build).__name__)


def _described(value: Any) -> str:
    """An operator as text: types, sizes and numbers, no entries of tensors."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(part) for part in value)})"
    if is_dataclass(value):
        parts = [f"{field.name}={_described(getattr(value, field.name))}" for field in fields(value)]
        return f"{type(value).__name__}({', '.join(parts)})"
    return str(value) if isinstance(value, (str, int, float, bool, type(None), torch.dtype)) else type(value).__name__


def _draws_rotations(value: Any) -> bool:
    """Whether a part of an operator hashes by rotations that were drawn for q, which is on the meta device."""
    if isinstance(value, Hashed):
        return value.rotations.is_meta
    if isinstance(value, (tuple, list)):
        return any(map(_draws_rotations, value))
    return is_dataclass(value) and any(_draws_rotations(getattr(value, field.name)) for field in fields(value))


def _reads_only(value: Any, q: Tensor, k: Tensor) -> bool:
    """Whether an operator has q and k as its queries and keys, and nothing that was computed from them."""
    if isinstance(value, Tensor):
        return not (value.is_meta and value.dtype.is_floating_point)
    if isinstance(value, Nystrom):
        return _reads_only(value.qk, q, k)  # its landmarks are means
    if isinstance(value, Hashed) and value.shared:
        k = q
    if isinstance(value, (tuple, list)):
        return all(_reads_only(part, q, k) for part in value)
    if not is_dataclass(value):
        return True
    own = {"q": q, "k": k}
    parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return all(x is own[name] if name in own else _reads_only(x, q, k) for name, x in parts)
