"""`replace(model, "window", width=65)`: every attention of a model computed by one operator, in place, until undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import nn

import headwise.operators
from headwise.errors import InputError, UnsupportedError
from headwise.models.intercept import uncompiled
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.unseen import other_attention
from headwise.replacement.install import in_place, transformers_models
from headwise.replacement.install import transformers_attention as interface
from headwise.replacement.install.operator_heads import Builder, OperatorHeads
from headwise.replacement.kinds import KINDS, Choice
from headwise.shapes import shown

Operator = str | Choice | Builder
"""The name of an operator, a choice of a plan, or a builder `(q, k, **masks) -> operator`."""


def replace(model: nn.Module, operator: Operator | Mapping[str | int, Operator], /, **options: Any) -> Replacement:
    """Compute the attention of `model` by another operator, in place.

    operator  a name ("window"), a builder (functools.partial(window, width=65), or an nn.Module with parameters), or
              {layer: operator} for some layers, by the name of a module, by a pattern ("*.self_attn", as of files) or
              by number; the others stay as they are
    options   of the operator, if it is given by name

    The model keeps its parameters, its names and its masks: padding on either side and causality, boolean or additive,
    and dropout as it had it.  nn.TransformerEncoder, models of transformers and everything else that calls
    scaled_dot_product_attention can be replaced; a mask that the operator cannot have raises UnsupportedError.

    >>> import torch
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
    >>> x = torch.randn(1, 9, 16)
    >>> before = encoder(x)
    >>> with replace(encoder, "window", width=3) as receipt:
    ...     after = encoder(x)
    >>> print(receipt)
    TransformerEncoder: 2 of 2 attention layers: 2 window width=3 leading=0
    >>> torch.equal(before, after), torch.equal(before, encoder(x))
    (False, True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"replace: model must be an nn.Module, but is {shown(model)}")
    model = uncompiled(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("replace: the model is compiled by torch.jit; replace its attention before that")
    for name, module in model.named_modules():
        if hasattr(module, interface.NAME):
            raise UnsupportedError(
                f"replace: the attention of {name or type(model).__name__} was replaced already; undo that first, or "
                "give all layers in one call"
            )
    sites = in_place.attention_sites(model)
    chosen = _by_site(list(sites), operator, options)
    receipt = Replacement(model, {}, tuple(sites), tuple(other_attention(model, sites)))
    try:
        for name, choice in chosen.items():
            heads = OperatorHeads(f"{type(model).__name__}.{name}" if name else type(model).__name__, choice)
            receipt._undo.append(in_place.install(sites[name], heads))
            receipt.sites[name] = str(heads)
        _enable(model, {id(sites[name]) for name in chosen}, receipt._undo)
    except BaseException:
        receipt.undo()
        raise
    return receipt


@final
class Replacement:
    """What `replace` has done, and how to undo it; a context manager that undoes it at its end.

    sites   {name of a module: its operator}
    known   the names of all modules that compute attention by a function that can be replaced
    left    the names of modules that look like attention, but call no such function
    """

    def __init__(self, model: nn.Module, sites: dict[str, str], known: tuple[str, ...], left: tuple[str, ...]) -> None:
        self.model, self.sites, self.known, self.left = model, sites, known, left
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Give the model its own attention back; may be called repeatedly."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        counts = {each: list(self.sites.values()).count(each) for each in self.sites.values()}
        listed = ", ".join(f"{count} {each}" for each, count in counts.items())
        done = f"{type(self.model).__name__}: {len(self.sites)} of {len(self.known)} attention layers: {listed}"
        if not self.left:
            return done
        names = ", ".join(self.left[:4]) + (f" and {len(self.left) - 4} more" if len(self.left) > 4 else "")
        return f"{done}; left as they are, because they call no attention function: {names}"


def named_operator(name: str, options: Mapping[str, Any]) -> Choice | Builder:
    """A registered kind, or the builder of this name in headwise.operators with its options set."""
    if name in KINDS:
        choice = Choice(name, options)
        if choice.definition.start is not None:
            raise UnsupportedError(
                f"replace: {name} is fitted to recorded attention, so it has no meaning by name; let headwise.plan "
                "fit it, or pass a builder"
            )
        return choice
    build = getattr(headwise.operators, name, None) if name.islower() else None
    parameters = list(inspect.signature(build).parameters.values()) if inspect.isfunction(build) else []
    if [each.name for each in parameters[:2]] != ["q", "k"]:
        known = sorted({*(kind for kind, x in KINDS.items() if x.start is None), *BUILDERS})
        raise InputError(f"replace: unknown operator {name!r}; by name there are {', '.join(known)}")
    allowed = [each.name for each in parameters[2:] if each.name not in MASKS]
    for option in options:
        if option not in allowed:
            raise InputError(f"replace: {name} has no option {option!r}; its options are {', '.join(allowed)}")
    missing = [each.name for each in parameters[2:] if each.default is each.empty and each.name not in options]
    if missing:
        raise InputError(f"replace: {name} needs {', '.join(missing)}; give a value, or pass a builder")
    return partial(build, **options)  # type: ignore[arg-type]


MASKS = ("causal", "key_mask", "pair_mask", "attn_bias")
BUILDERS = ("dot_product", "embedded_gaussian", "fixed_steps", "gaussian", "strided_steps")
"""Builders that need only q and k, beside the registered kinds."""


def _by_site(sites: list[str], operator: Any, options: dict[str, Any]) -> dict[str, Choice | Builder]:
    if not isinstance(operator, Mapping):
        choice: Choice | Builder = _operator(operator, options)
        return dict.fromkeys(sites, choice)
    if options:
        raise InputError(f"replace: options ({', '.join(options)}) belong to the operator of each layer; use Choice")
    chosen: dict[str, Choice | Builder] = {}
    for layer, each in operator.items():
        if isinstance(layer, int) and not isinstance(layer, bool):
            found = sites[layer : layer + 1] if layer >= 0 else []
        else:
            found = [site for site in sites if site.startswith(f"{layer}.") or fnmatchcase(site, str(layer))]
        if not found:
            shown_sites = ", ".join(map(repr, sites[:8])) + (" …" if len(sites) > 8 else "")
            raise InputError(f"replace: no attention at {layer!r}; the {len(sites)} attention layers are {shown_sites}")
        choice = _operator(each, {})
        chosen |= dict.fromkeys(found, choice)
    return chosen


def _operator(operator: Any, options: Mapping[str, Any]) -> Any:
    """A Choice or a builder."""
    if isinstance(operator, str):
        return named_operator(operator, options)
    if options:
        raise InputError(f"replace: options ({', '.join(options)}) are for operators by name; use functools.partial")
    if isinstance(operator, Choice):
        return named_operator(operator.kind, operator.options)
    if not callable(operator):
        raise InputError(
            f"replace: operator must be a name, a builder or {{layer: operator}}, but is {shown(operator)}"
        )
    return operator


def _enable(model: nn.Module, replaced: set[int], undo: list[Callable[[], None]]) -> None:
    """Make the containers of replaced modules call them: transformers' interface, and no nested tensors."""
    for module in model.modules():
        inside = [part for part in module.modules() if id(part) in replaced]
        if inside and isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            undo.append(partial(setattr, module, "use_nested_tensor", True))
            module.use_nested_tensor = False
        if is_pretrained(module) and any(x is module or transformers_models.calls_interface(x) for x in inside):
            undo.append(transformers_models.use_interface(module))
