"""What a head may be replaced by: each kind with its options, learned tensors, operator, and where it is allowed.

A further kind is a further entry of KINDS.  Learned tensors are per head; `build` gets them stacked, (h, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.errors import UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.near_far import near_far
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projections import Dense
from headwise.operators.linear.window_low_rank import window_low_rank
from headwise.operators.relative.offset import offset
from headwise.operators.relative.toeplitz import toeplitz_softmax
from headwise.operators.softmax import softmax
from headwise.operators.sparse.hashed import hashed, random_rotations
from headwise.operators.sparse.window import window
from headwise.operators.uniform import uniform

if TYPE_CHECKING:
    from headwise.replacement.choice import Choice

Options = Mapping[str, int | float]
Tensors = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


@final
@dataclass(frozen=True)
class Option:
    """A number with a default; a whole number if the default is one."""

    default: int | float
    least: int | float | None = None


@final
@dataclass(frozen=True, eq=False)
class Call:
    """What an operator is built from: q (b, h, m, k), k (b, h or fewer, n, k), `keep` (b, n) True at real keys."""

    q: Tensor
    k: Tensor
    keep: Tensor | None
    causal: bool
    scale: float

    @property
    def m(self) -> int:
        return self.q.shape[-2]

    @property
    def n(self) -> int:
        return self.k.shape[-2]

    @property
    def shared_keep(self) -> Tensor | None:
        """(b, 1, n): the same for every head."""
        return None if self.keep is None else self.keep.unsqueeze(-2)


@final
@dataclass(frozen=True, eq=False)
class Kind:
    """One way to replace a head, and where it may be used."""

    about: str
    operator: Callable[[Options, Call, Tensors], AttentionOperator]
    options: dict[str, Option] = field(default_factory=dict)
    begin: Callable[[Options, int, int], dict[str, Tensor]] = lambda options, n, d: {}
    causal: bool = False  # has a causal form
    cached: bool = False  # one query against all keys gives the row that all queries together would give
    positional: bool = True  # speaks of positions that queries and keys share, so not for cross-attention
    anchored: bool = False  # counts positions from the first real key, so padding before it has to be moved away
    looks: bool = True  # P depends on q and k

    def parameters(self, choice: Choice, n: int, d: int) -> Shapes:
        """Shapes of the learned tensors of one head, for sequences of n and heads of width d."""
        return {name: tuple(x.shape) for name, x in self.begin(choice.options, n, d).items()}

    def initial(self, choice: Choice, n: int, d: int) -> dict[str, Tensor]:
        """Their values before anything was fitted."""
        return self.begin(choice.options, n, d)

    def why_not_causal(self, choice: Choice) -> str | None:
        """A reason if it may not stand in a decoder."""
        if not self.causal:
            return f"{choice.kind} lets a query see later keys and has no causal form"
        if choice.kind == "shift" and choice.options["offset"] > 0:
            return f"shift by {choice.options['offset']} looks at a later key; use an offset of at most 0"
        return None

    def build(
        self,
        choice: Choice,
        q: Tensor,
        k: Tensor,
        *,
        keep: Tensor | None = None,
        causal: bool = False,
        scale: float,
        parameters: Tensors,
    ) -> AttentionOperator:
        """P for the heads of one group: (b, h, m, n), or fewer batch axes where heads do not differ."""
        call = Call(q, k, keep, causal, scale)
        if causal and (reason := self.why_not_causal(choice)):
            raise UnsupportedError(f"{reason}; use one of {', '.join(n for n, kind in KINDS.items() if kind.causal)}")
        if self.positional and call.m != call.n and not (causal and self.cached and call.m < call.n):
            raise UnsupportedError(
                f"{choice.kind}: m = {call.m} queries against n = {call.n} keys, "
                + (
                    f"but {choice.kind} cannot answer new queries from cached keys; call generate with use_cache=False"
                    if causal
                    else "but it needs queries and keys at the same positions; use exact for cross-attention"
                )
            )
        return self.operator(choice.options, call, parameters)

    def cost(self, choice: Choice, n: int, d: int, causal: bool) -> Cost:
        """What one head of one sequence costs, from the operator itself."""
        return _cost(choice, n, d, causal)


@cache  # building P takes 0.1 to 20 ms and a search asks for the same few costs thousands of times
def _cost(choice: Choice, n: int, d: int, causal: bool) -> Cost:
    kind, zeros = KINDS[choice.kind], torch.zeros(1, 1, n, d)
    stacked = {name: x.unsqueeze(0) for name, x in kind.initial(choice, n, d).items()}
    P = kind.build(choice, zeros, zeros, causal=causal, scale=1.0, parameters=stacked)
    return P.cost(d)


def _exact(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    return softmax(c.q, c.k, scale=c.scale, causal=c.causal, key_mask=c.keep)


def _uniform(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    return uniform(c.m, c.n, causal=c.causal, key_mask=c.shared_keep)


def _shift(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    return offset(c.m, c.n, int(options["offset"]), key_mask=c.shared_keep, device=c.q.device)


def _offsets(c: Call) -> Tensor:
    """j - i for the diagonals of P from the bottom left, the last query at the last key: (m + n - 1,)"""
    return torch.arange(-(c.n - 1), c.m, device=c.q.device)


def _by_offset(c: Call, logits: Tensor) -> AttentionOperator:
    logits = logits.to(c.q.dtype).unsqueeze(0)  # (1, h, m + n - 1)
    return toeplitz_softmax(logits, c.m, c.n, causal=c.causal, key_mask=c.shared_keep)


def _toeplitz(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    reach = int(options["reach"])
    return _by_offset(c, own["profile"].index_select(-1, _offsets(c).clamp(-reach, reach) + reach))


def _quadratic(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    away = _offsets(c).to(own["centre"].dtype) - own["centre"].unsqueeze(-1)
    return _by_offset(c, -away.square() * (-2 * own["log_width"]).exp().unsqueeze(-1) / 2)


def _window(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    width, first = int(options["width"]), min(int(options["first"]), c.n)
    return window(c.q, c.k, width, leading=first, scale=c.scale, causal=c.causal, key_mask=c.keep)


def _nystrom(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    return nystrom(c.q, c.k, min(int(options["landmarks"]), c.m, c.n), scale=c.scale, key_mask=c.keep)


def _columns(kind: str, c: Call, matrix: Tensor) -> Dense:
    """The columns of a learned projection for n keys; fewer than r are no reason to stop."""
    if c.n > matrix.shape[-1]:
        raise UnsupportedError(
            f"{kind}: its projection was fitted for at most {matrix.shape[-1]} keys, but there are {c.n}; "
            "shorten the input, or plan again with a greater length"
        )
    return Dense(matrix[..., : c.n].to(c.q.dtype))


def _projected(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    e, f = (_columns("projected", c, own[name]) for name in ("e", "f"))
    return projected(c.q, c.k, e, f, scale=c.scale, key_mask=c.keep)


def _factored(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    e, f = (_columns("factored", c, own[name]) for name in ("e", "f"))
    return factored(c.q, c.k, e, f, scale=options["sharpness"] * c.scale, key_mask=c.keep)


def _double_softmax(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    return efficient(c.q, c.k, scale=options["sharpness"] * c.scale, causal=c.causal, key_mask=c.keep)


def _window_low_rank(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    e, f = (_columns("window_low_rank", c, own[name]) for name in ("e", "f"))
    first = min(int(options["first"]), c.n)
    bias, width = own["bias"].to(c.q.dtype), int(options["width"])
    return window_low_rank(c.q, c.k, width, e, f, bias, leading=first, scale=c.scale, key_mask=c.keep)


def _near_far(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    a, b, weight = (own[name].to(c.q.dtype) for name in ("a", "b", "c"))
    block, first = int(options["block"]), min(int(options["first"]), c.n - 1)
    return near_far(c.q, c.k, a, b, weight, block=block, leading=first, scale=c.scale, causal=c.causal, key_mask=c.keep)


def _hashed(options: Options, c: Call, own: Tensors) -> AttentionOperator:
    rounds, chunk = int(options["rounds"]), int(options["chunk"])
    rotations = _rotations(c.q.shape[-1], c.n / chunk, rounds).to(c.q)
    k = c.k if c.k.shape[-3] == c.q.shape[-3] else c.k.repeat_interleave(c.q.shape[-3] // c.k.shape[-3], -3)
    return hashed(c.q, k, rotations, rounds=rounds, chunk=chunk, scale=c.scale, causal=c.causal, key_mask=c.keep)


@torch.compiler.assume_constant_result
def _rotations(width: int, buckets: float, rounds: int) -> Tensor:
    return random_rotations(width, buckets, rounds, generator=torch.Generator().manual_seed(0))


def _pooled(rank: int, n: int) -> Tensor:
    """Means of r stretches of n positions, as even as can be: (r, n)"""
    of = (torch.arange(n) * rank).div(n, rounding_mode="floor")
    e = torch.nn.functional.one_hot(of, rank).T.float()
    return e / e.sum(-1, keepdim=True).clamp(min=1)


def _begin_projection(options: Options, n: int, d: int) -> dict[str, Tensor]:
    e = _pooled(min(int(options["rank"]), n), n)
    return {"e": e, "f": e.clone()}


def _begin_window_low_rank(options: Options, n: int, d: int) -> dict[str, Tensor]:
    begun = _begin_projection(options, n, d)
    # a mean that stands for n / r keys weighs as much as they do
    return {**begun, "bias": begun["e"].gt(0).sum(-1).float().log()}


def _begin_near_far(options: Options, n: int, d: int) -> dict[str, Tensor]:
    rank = int(options["rank"])
    # far keys weigh as if their scores were zero
    return {"a": torch.zeros(rank, d), "b": torch.zeros(rank, d), "c": torch.zeros(rank) - math.log(rank)}


def _begin_toeplitz(options: Options, n: int, d: int) -> dict[str, Tensor]:
    return {"profile": torch.zeros(2 * int(options["reach"]) + 1)}


def _begin_quadratic(options: Options, n: int, d: int) -> dict[str, Tensor]:
    return {"centre": torch.zeros(()), "log_width": torch.zeros(())}


RANK, SHARP = Option(64, 1), Option(1.0, 1e-6)

KINDS: dict[str, Kind] = {
    "exact": Kind("softmax over all keys, as before", _exact, causal=True, cached=True, positional=False),
    "uniform": Kind("the mean of the values", _uniform, causal=True, cached=True, positional=False, looks=False),
    "shift": Kind(
        "the key `offset` places further, at the ends the outermost one",
        _shift,
        {"offset": Option(0)},
        causal=True,
        cached=True,
        looks=False,
    ),
    "toeplitz": Kind(
        "softmax of a learned profile over offsets -reach..reach, constant beyond",
        _toeplitz,
        {"reach": Option(128, 0)},
        _begin_toeplitz,
        causal=True,
        cached=True,
        looks=False,
    ),
    "quadratic": Kind(
        "softmax of -(offset - centre)^2 / (2 width^2), both learned",
        _quadratic,
        begin=_begin_quadratic,
        causal=True,
        cached=True,
        looks=False,
    ),
    "window": Kind(
        "softmax over `width` neighbours and the `first` keys",
        _window,
        {"width": Option(65, 1), "first": Option(0, 0)},
        causal=True,
        cached=True,
        anchored=True,
    ),
    "nystrom": Kind("through means of segments", _nystrom, {"landmarks": RANK}, positional=False, anchored=True),
    "projected": Kind(
        "softmax over `rank` learned mixtures of the keys",
        _projected,
        {"rank": RANK},
        _begin_projection,
        positional=False,
        anchored=True,
    ),
    "double_softmax": Kind(
        "softmax over features of q times softmax over keys of k",
        _double_softmax,
        {"sharpness": SHARP},
        causal=True,
        cached=True,
        positional=False,
    ),
    "factored": Kind(
        "the double softmax over `rank` learned mixtures of the keys",
        _factored,
        {"rank": RANK, "sharpness": SHARP},
        _begin_projection,
        positional=False,
        anchored=True,
    ),
    "window_low_rank": Kind(
        "softmax over `width` neighbours, the `first` keys and `rank` learned mixtures, one normaliser for all",
        _window_low_rank,
        {"width": Option(33, 1), "rank": Option(16, 1), "first": Option(0, 0)},
        _begin_window_low_rank,
        anchored=True,
    ),
    "near_far": Kind(
        "softmax over its own and the neighbouring blocks and the `first` keys, `rank` learned features for the others",
        _near_far,
        {"block": Option(16, 1), "rank": Option(4, 1), "first": Option(0, 0)},
        _begin_near_far,
        causal=True,
        anchored=True,
    ),
    "hashed": Kind(
        "softmax over keys that fall near the query in a sorted hash",
        _hashed,
        {"rounds": Option(4, 1), "chunk": Option(64, 1)},
        causal=True,
    ),
}
