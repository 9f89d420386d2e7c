"""Name the attention of a model that `intercept` does not see.

Three kinds of evidence, on one sequence:

- while the model runs, a softmax over the last of at least three axes whose result is then multiplied with a matrix,
  or a fused attention kernel, outside every attention call that was seen.  This is found below Python (a
  `TorchDispatchMode`), so also in TorchScript;
- a call of `flex_attention`, whose scores can be changed by any code;
- a module called attention, with projections called query, key and value or the like, that made no call that was seen.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from headwise.errors import InputError
from headwise.models.intercept import AttentionCall, intercept, running_calls
from headwise.models.run import Batch, as_it_was, run_model, without_cache

FUSED = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_native_multi_head_attention")
SOFTMAX = ("_softmax", "_safe_softmax")
PRODUCTS = ("bmm", "baddbmm")
PROJECTIONS = re.compile(r"(^|_)(w?(q|k|v|kv|qk|qkv)|quer(y|ies)|keys?|values?)(_|$)|in_proj|c_attn")
"""Names of the projections of an attention layer, in lower case."""

BY_HAND = "its attention is written by hand"
FLEXIBLE = "it calls flex_attention"
SCRIPTED = "it runs as TorchScript"
DID_NOT_RUN = "it did not run on these inputs, or not in this thread"
OTHERWISE = "it ran, but called no attention function of torch"


def check_own_attention(model: nn.Module) -> None:
    """Raise InputError if headwise replaced attention of the model: exact attention is what is measured."""
    replaced = [name for name, module in model.named_modules() if getattr(module, "replaces_attention", False)]
    if replaced:
        first, others = replaced[0].removesuffix(".headwise") or "this module", len(replaced) - 1
        raise InputError(
            f"{type(model).__name__}: headwise replaced the attention of {first}"
            f"{f' and {others} more modules' if others else ''}, and only exact attention can be measured head by "
            "head; give the original model, or call undo() of the receipt of replace"
        )


def unseen_attention(model: nn.Module, batch: Batch) -> list[dict[str, str]]:
    """name, class and why for each module that attends, or looks as if, but is not seen on `batch`."""
    names = {id(module): name for name, module in model.named_modules()}
    watch, functions = _Watch(names), _FlexAttention(names)
    batch = without_cache(model, batch)
    seen: set[str] = set()

    def answer(site: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        with watch.paused():
            return attention(*args, **kwargs)

    def see(call: AttentionCall) -> None:
        seen.add(call.site.partition("@")[0])

    with torch.no_grad(), as_it_was(model), intercept(model, see, answer=answer), functions:
        try:
            with watch:
                run_model(model, batch)
        except InputError:  # an operator that cannot be watched; if it was the model, this raises again
            watch.attends.clear()
            run_model(model, batch)
    modules = dict(model.named_modules())
    found = {
        name: BY_HAND
        for name in watch.attends
        if name not in seen  # seen, or the softmax of weights that a caller of torch's layer requested
    }
    found.update(dict.fromkeys(functions.callers, FLEXIBLE))
    known = seen | found.keys()
    for name in other_attention(model, known):
        found[name] = OTHERWISE if name in watch.ran else DID_NOT_RUN
    return [
        {
            "name": name or type(model).__name__,
            "class": _class_name(modules[name]),
            "why": SCRIPTED if isinstance(modules[name], torch.jit.ScriptModule) else why,
        }
        for name, why in found.items()
    ]


def other_attention(model: nn.Module, known: Collection[str]) -> list[str]:
    """The names of modules that look like attention, and neither hold nor are part of those that are known."""
    return [
        name
        for name, module in model.named_modules()
        if _looks_like_attention(name, module)
        and not any(_inside(a, b) for x in known for a, b in ((x, name), (name, x)))
    ]


class _FlexAttention(TorchFunctionMode):
    """Which modules call torch.nn.attention.flex_attention."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.callers: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", None) == "flex_attention":
            self.callers.update((call.name, None) for call in running_calls(self.names, sys._getframe(1))[:1])
            with _disable_current_modes():  # it cannot be watched
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Which modules ran, and which of them attend outside the calls that `intercept` sees."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.ran: set[str] = set()
        self.attends: dict[str, None] = {}  # in the order in which they ran
        self._weights = WeakTensorKeyDictionary()  # results of a softmax -> name of the module that computed it
        self._paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args = tuple(_tensor_again(x, y) for x, y in zip(args, func._schema.arguments, strict=False))
        out = func(*args, **(kwargs or {}))
        calls = [] if self._paused else running_calls(self.names, sys._getframe(1))
        if calls:
            self.ran.update(call.name for call in calls)
            self._note(func._schema.name.removeprefix("aten::"), calls[0].name, args, out)
        return out

    def _note(self, function: str, module: str, args: tuple, out: Any) -> None:
        if function.startswith(FUSED):
            self.attends[module] = None
        elif function in SOFTMAX:
            x, axis = args[:2]
            if x.dim() >= 3 and axis in (-1, x.dim() - 1):
                self._weights[out] = module
        else:
            weights = next((x for x in args if isinstance(x, Tensor) and x in self._weights), None)
            if weights is None:
                return
            if function in PRODUCTS:
                if min(weights.shape[-2:]) > 1:  # a single row mixes experts, not tokens
                    self.attends[self._weights[weights]] = None
            elif isinstance(out, Tensor) and out.numel() == weights.numel():  # a view, a cast, dropout
                self._weights[out] = self._weights[weights]


def _tensor_again(x: Any, argument: Any) -> Any:
    """x as an operator takes it: TorchScript computes with tensors of one number, which arrive here as numbers."""
    is_number = isinstance(x, (int, float)) and str(argument.type) == "Tensor"
    return torch.tensor(x) if is_number else x


def _looks_like_attention(name: str, module: nn.Module) -> bool:
    words = f"{name.rpartition('.')[2]} {_class_name(module)}".lower()
    if "attn" not in words and "attention" not in words:
        return False
    parts = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
    return any(PROJECTIONS.search(part.lower()) for part in parts)


def _class_name(module: nn.Module) -> str:
    return getattr(module, "original_name", type(module).__name__)  # TorchScript keeps the name of the class


def _inside(name: str, other: str) -> bool:
    """Whether the module `name` is `other` or a part of it."""
    return name == other or name.startswith(f"{other}.") or not other
