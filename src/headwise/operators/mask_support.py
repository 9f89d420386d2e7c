"""What builders take: kinds of mask, declared once for each builder, and whether the length may be a symbol."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from headwise.errors import UnsupportedError
from headwise.shapes import symbolic, truth_values


class MaskKind(Enum):
    """The mask arguments of builders and layers."""

    CAUSAL = "causal"
    KEY_MASK = "key_mask"
    PAIR_MASK = "pair_mask"
    ATTN_BIAS = "attn_bias"


CAUSAL, KEY_MASK, PAIR_MASK, ATTN_BIAS = MaskKind

P = ParamSpec("P")
R = TypeVar("R")


def supports(
    *kinds: MaskKind,
    instead: str | Mapping[MaskKind, str] = "softmax",
    always_causal: bool = False,
    one_length: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a builder with the kinds of mask it takes; another kind raises UnsupportedError naming `instead`.

    `always_causal` builders have no argument `causal`: True is accepted, an explicit False raises.
    `one_length` says why a builder cannot be exported by torch.export with a symbolic length.
    """

    def alternative(kind: MaskKind) -> str:
        return instead if isinstance(instead, str) else instead.get(kind, "softmax")

    def decorate(build: Callable[P, R]) -> Callable[P, R]:
        name = getattr(build, "__name__", str(build))

        @functools.wraps(build)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs.get(CAUSAL.value) is not None:  # builders read it before the mask is checked
                truth_values(name, causal=kwargs[CAUSAL.value])
            lengths = (size for x in args for size in (x.shape[-2:-1] if isinstance(x, Tensor) else (x,)))
            if one_length is not None and symbolic(*lengths):
                raise not_exported(name, one_length)
            for kind in MaskKind:
                if kind in kinds or kind.value not in kwargs:
                    continue
                requested = kwargs.pop(kind.value)
                if kind is CAUSAL and always_causal:
                    if requested is False:
                        raise UnsupportedError(f"{name}: is always causal; for causal=False use {alternative(kind)}")
                elif requested is not None and requested is not False:
                    raise UnsupportedError(f"{name}: does not support {kind.value}; use {alternative(kind)}")
            return build(*args, **kwargs)

        declared = frozenset(kinds) | ({CAUSAL} if always_causal else frozenset())
        checked.__dict__["supports"] = declared
        checked.__dict__["one_length"] = one_length
        checked.__dict__["instead"] = {kind: alternative(kind) for kind in MaskKind if kind not in declared}
        return checked

    return decorate


def not_exported(name: str, why: str) -> UnsupportedError:
    """The error for an export with a symbolic length that the operator `name` cannot have."""
    return UnsupportedError(
        f"{name}: {why}, so it cannot be exported with a symbolic length; export it for one length, or use softmax, "
        "window or efficient"
    )


def supported(build: Callable[..., Any]) -> frozenset[MaskKind]:
    """The kinds of mask that a builder, or the one in a functools.partial, declared with `supports`."""
    return getattr(_declared(build), "supports", frozenset())


def support_table(builders: Sequence[Callable[..., Any]]) -> str:
    """A row for each builder and a column for each kind of mask: yes, or what to use instead; in Markdown."""
    rows = [("builder", *(f"`{kind.value}`" for kind in MaskKind)), ("---",) * (1 + len(MaskKind))]
    for build in builders:
        instead = getattr(build, "instead", {})
        rows.append((f"`{build.__name__}`", *(instead.get(kind, "yes") for kind in MaskKind)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def check_accepts(owner: str, build: Callable[..., Any], masks: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if a builder that declares nothing has no argument for one of these masks."""
    if not masks or torch.compiler.is_compiling() or hasattr(_declared(build), "supports"):
        return  # builders that declare what they support raise themselves
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in masks.keys() - {parameter.name for parameter in parameters}:
        operator = getattr(_declared(build), "__name__", type(build).__name__)
        raise UnsupportedError(f"{owner}: {operator} has no argument {name}, so it cannot be masked; use softmax")


def _declared(build: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(build, functools.partial):
        build = build.func
    return build
