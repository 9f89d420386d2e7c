"""What a head may be replaced by: kinds of operators, registered by name, and a head's choice of one.

    {"kind": "window", "width": 65, "leading": 1}

is how a plan writes a `Choice`.  `register_kind` adds a kind, and with it everything a plan needs to know about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.operators._kernels.key_patterns import KeyPattern
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask

Options = Mapping[str, Any]
"""Numbers by name: whole ones are int."""

Tensors = dict[str, Tensor]

LARGEST_HEAD = 1 << 28
"""Learned numbers of one head: one gigabyte."""


@final
@dataclass(frozen=True)
class KindOption:
    """A number with a default and bounds; a whole number if the default is one."""

    default: int | float
    minimum: int | float | None = None
    maximum: int | float | None = None

    def checked(self, owner: str, value: Any) -> int | float:
        """`value` as this option stores it; `owner` is the name in error messages."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{owner} must be a number, but is {value!r}")
        if isinstance(self.default, int):
            if value != int(value):
                raise InputError(f"{owner} must be a whole number, but is {value!r}")
            value = int(value)
        if self.minimum is not None and value < self.minimum:
            raise InputError(f"{owner} must be at least {self.minimum}, but is {value}")
        if self.maximum is not None and value > self.maximum:
            raise InputError(f"{owner} must be at most {self.maximum}, but is {value}")
        return value


@final
@dataclass(frozen=True, eq=False)
class HeadInputs:
    """What the operator of some heads is built from.

    q                (b, h, m, k)
    k                (b, h, n, k), or fewer heads, each shared by consecutive heads of q
    mask             causality and padding: mask.causal, mask.key_mask (b, 1, n), True = attend
    padding_before   (b, 1), number of padding keys before the first real one, where padding could not be moved to the
                     end because queries are fewer than keys; only for kinds that count `from_first_key`
    """

    q: Tensor
    k: Tensor
    mask: Mask
    scale: float
    padding_before: Tensor | None = None

    @property
    def m(self) -> int:
        return self.q.shape[-2]

    @property
    def n(self) -> int:
        return self.k.shape[-2]

    @property
    def masks(self) -> dict[str, Any]:
        """`causal` and `key_mask` (b, 1, n), as keyword arguments of builders."""
        return {"causal": self.mask.causal, "key_mask": self.mask.key_mask}


@final
@dataclass(frozen=True, eq=False)
class AttentionSample:
    """One recorded attention call: its inputs, v (b, h or fewer, n, d), and the output (b, h, m, d) of the model."""

    inputs: HeadInputs
    v: Tensor
    output: Tensor


@final
@dataclass(frozen=True, eq=False)
class Kind:
    """One way to replace a head.

    summary          one line for people
    build            (inputs, options, learned tensors stacked (h, *shape)) -> P with batch (b, h), (b, 1) or ()
    options          the numbers that a plan may set
    initial          (options, length, width) -> initial values of the learned tensors of one head
    start            (options, samples, generator) -> better initial values from recorded calls, stacked (h, *shape)
    step_sizes       initial step size of Adam for each learned tensor (default 0.02)
    candidates       (length, causal) -> option values that `plan` tries (default: the defaults of all options)
    causal           whether P has a causal form; a function of the options if that depends on them
    cached           one query against all keys gives the row that all queries together give, so a cache can be used
    cross_attention  works for queries and keys at different positions
    from_first_key   positions count from the first real key, so padding before it is moved to the end
    reads_scores     P depends on q and k
    by_products      P depends on them through the products q . k alone (default).  Other functions of q and k, such as
                     features of each, depend on where a text stands if positions rotate them, and are refused there
    ablation         options -> the choice that is left without what is learned: a plan takes the learned kind only for
                     heads to which it is nearer than this one, and than its own initial tensors, on a kind of text
                     that it was not fitted to
    features         (x, scale, options) -> features (…, r) of queries or keys x, if P is a softmax over the features of
                     a query times, for each of them, a softmax over the keys: a cache then holds sums, and no key
    pattern          (inputs, options) -> the keys of each query, if P is a softmax over them: all such heads of a layer
                     are one call of the compiled kernels.  Learned tensors are the a, b, c of `near_far`, or none.
    """

    summary: str
    build: Callable[[HeadInputs, Options, Tensors], AttentionOperator]
    options: Mapping[str, KindOption] = field(default_factory=dict)
    initial: Callable[[Options, int, int], Tensors] = lambda options, length, width: {}
    start: Callable[[Options, Sequence[AttentionSample], torch.Generator], Tensors] | None = None
    step_sizes: Mapping[str, float] = field(default_factory=dict)
    candidates: Callable[[int, bool], Iterable[Options]] = lambda length, causal: [{}]
    causal: bool | Callable[[Options], bool] = False
    cached: bool = False
    cross_attention: bool = False
    from_first_key: bool = False
    reads_scores: bool = True
    by_products: bool = True
    ablation: Callable[[Options], Choice] | None = None
    features: Callable[[Tensor, float, Options], Tensor] | None = None
    pattern: Callable[[HeadInputs, Options], KeyPattern] | None = None


KINDS: dict[str, Kind] = {}
"""Every registered kind by name."""


def register_kind(name: str, kind: Kind) -> None:
    """Make `kind` known to plans, to `rewrite` and to `load` under `name`.

    A registered kind is among the candidates of `plan`, may be written into a plan.json, and is saved with a model;
    register it again before loading such a model in another process.  For example an operator of your own:

    >>> @dataclass(frozen=True, eq=False)
    ... class FirstKey(AttentionOperator):
    ...     '''P_ij = 1 for j = 0: every query attends to the first key.'''
    ...
    ...     m: int
    ...     n: int
    ...
    ...     @property
    ...     def shape(self):
    ...         return torch.Size((self.m, self.n))
    ...
    ...     def apply(self, v):
    ...         return v[..., :1, :].expand(*v.shape[:-2], self.m, v.shape[-1])
    ...
    ...     def cost(self, d):
    ...         return Cost(multiply_adds=0)
    >>> register_kind(
    ...     "first_key",
    ...     Kind(
    ...         "attends to the first key only",
    ...         build=lambda inputs, options, tensors: FirstKey(inputs.m, inputs.n),
    ...         causal=True,
    ...         cached=True,
    ...         from_first_key=True,
    ...         reads_scores=False,
    ...     ),
    ... )
    >>> print(Choice("first_key"))
    first_key
    >>> del KINDS["first_key"]
    """
    for word in (name, *kind.options):
        if not word.isidentifier():
            raise InputError(f"register_kind: {word!r} must be a Python identifier, because plans are written with it")
    if name in KINDS:
        raise InputError(f"register_kind: {name!r} is registered already; choose another name")
    KINDS[name] = kind


@final
@dataclass(frozen=True)
class Choice:
    """The kind of operator for one head, and its options.  Omitted options take their defaults.

    >>> Choice("window", {"width": 65}) == Choice.from_dict({"kind": "window", "width": 65, "leading": 0})
    True
    """

    kind: str
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.definition.options
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise InputError(
                f"{self.kind}: unknown option {', '.join(map(repr, unknown))}; "
                f"its options are {', '.join(known) or 'none'}"
            )
        values = {name: self.options.get(name, option.default) for name, option in known.items()}
        values = {name: known[name].checked(f"{self.kind}: {name}", value) for name, value in values.items()}
        object.__setattr__(self, "options", MappingProxyType(values))

    @property
    def definition(self) -> Kind:
        """The registered kind."""
        if self.kind not in KINDS:
            raise InputError(
                f"unknown kind of operator {self.kind!r}; the registered kinds are {', '.join(KINDS)} "
                "(headwise.replacement.register_kind adds one)"
            )
        return KINDS[self.kind]

    @property
    def causal(self) -> bool:
        """Whether it may be used in a decoder."""
        causal = self.definition.causal
        return causal(self.options) if callable(causal) else causal

    def check_causal(self, owner: str) -> None:
        """Raise UnsupportedError unless it may be used in a decoder."""
        if not self.causal:
            known = ", ".join(name for name, kind in KINDS.items() if kind.causal)
            raise UnsupportedError(f"{owner} is causal, but {self} attends to later keys; use one of {known} instead")

    def check_rotary(self, owner: str) -> None:
        """Raise UnsupportedError unless it may be used in a model whose positions rotate q and k."""
        if not self.definition.by_products:
            raise UnsupportedError(
                f"{owner} rotates queries and keys by their positions, but {self} reads more of them than their "
                "products, so that the answer would depend on where a text stands; use window instead"
            )

    def initial(self, length: int, width: int) -> Tensors:
        """Learned tensors of one head before fitting, for sequences of up to `length` and heads of `width`."""
        tensors = self.definition.initial(self.options, length, width)
        return {name: x.float() for name, x in tensors.items()}  # whatever the default dtype of the process is

    def shapes(self, length: int, width: int) -> dict[str, torch.Size]:
        """The shapes of the learned tensors of one head; InputError if they are too large to be meant."""
        try:
            with torch.device("meta"):  # no memory, whatever the sizes
                tensors = self.initial(length, width)
        except RuntimeError:  # a kind that looks at values
            tensors = self.initial(length, width)
        if sum(x.numel() for x in tensors.values()) > LARGEST_HEAD:
            raise InputError(
                f"{self} at length {length} and width {width} would learn more than {LARGEST_HEAD} numbers"
            )
        return {name: x.shape for name, x in tensors.items()}

    def operator(self, inputs: HeadInputs, tensors: Tensors) -> AttentionOperator:
        """P for heads with the same choice: (b, h, m, n), or fewer batch axes where heads do not differ."""
        self.check_inputs(inputs)
        return self.definition.build(inputs, self.options, tensors)

    def check_inputs(self, inputs: HeadInputs) -> None:
        """Raise UnsupportedError for a causal call or for numbers of queries and keys that it is not for."""
        kind, m, n = self.definition, inputs.m, inputs.n
        if inputs.mask.causal:
            self.check_causal("attention")
        if not kind.cross_attention and m != n and not (inputs.mask.causal and kind.cached and m < n):
            raise UnsupportedError(
                f"{self.kind}: m = {m} queries against n = {n} keys, but "
                + (
                    f"{self.kind} cannot compute new queries from cached keys; call generate with use_cache=False"
                    if inputs.mask.causal
                    else "it needs queries and keys at the same positions; "
                    + ("if it is the token after cached keys, call with use_cache=False; " if m == 1 else "")
                    + "use softmax for cross-attention, in headwise.replace by naming the other layers, "
                    "{'*.self_attn': ...}"
                )
            )

    def cost(self, n: int, width: int, causal: bool) -> Cost:
        """Cost of one head for one sequence of n, as the operator itself counts it."""
        return _cost(self, n, width, causal)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.options}

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Choice:
        if not isinstance(d, Mapping) or not isinstance(d.get("kind"), str):
            raise InputError(f'an operator is written {{"kind": "window", "width": 65}}, but the plan has {d!r}')
        return Choice(d["kind"], {name: value for name, value in d.items() if name != "kind"})

    @staticmethod
    def from_str(text: str) -> Choice:
        """The inverse of `str(choice)`."""
        kind, *options = text.split()
        pairs = (option.partition("=") for option in options)
        return Choice(kind, {name: float(value) for name, _, value in pairs})

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.options.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Choice, (self.kind, dict(self.options))  # a mapping proxy cannot be copied

    def __repr__(self) -> str:
        return f"Choice({self.kind!r}, {dict(self.options)})"

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{name}={value:.15g}" for name, value in self.options.items())])


@cache  # building P takes 0.1 to 20 ms, and a search needs the same few costs thousands of times
def _cost(choice: Choice, n: int, width: int, causal: bool) -> Cost:
    zeros = torch.zeros(1, 1, n, width, dtype=torch.float32)
    tensors = {name: x.unsqueeze(0) for name, x in choice.initial(n, width).items()}
    cost = choice.operator(HeadInputs(zeros, zeros, Mask(n, n, causal), 1.0), tensors).cost(width)
    # the fused kernel skips the masked half
    return replace(cost, multiply_adds=cost.multiply_adds // 2) if causal and choice.kind == "softmax" else cost


def candidates(length: int, *, causal: bool, rotary: bool = False) -> list[Choice]:
    """The choices that `plan` tries for sequences of up to `length`."""
    choices = [Choice(name, options) for name, kind in KINDS.items() for options in kind.candidates(length, causal)]
    return [x for x in choices if (x.causal or not causal) and (x.definition.by_products or not rotary)]


def has_rotary_positions(model: nn.Module) -> bool:
    """Whether positions rotate queries and keys, by the names that transformers gives its modules and settings."""
    config = getattr(model, "config", None)
    return getattr(config, "rotary_dim", None) is not None or any(
        "Rotary" in type(module).__name__ for module in model.modules()
    )
