"""Intercept every scaled_dot_product_attention call of a model, named after the module that makes it.

    with intercept(model, see):          # see(call) is called for every attention call, in order
        model(**batch)

A call holds the q, k, v, scale and mask that the model uses: after rotary embeddings, with grouped queries.  Functions
of torch are replaced while a context is open, so no model family needs code of its own here, and the model itself is
not touched: the module that makes a call is found on the stack of running calls.  A replaced function acts in the
thread that opened a context, on the model of that context; everywhere else it is the original.  So any number of
threads may intercept, and run intercepted models, at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.operators.masks import Mask


class InterceptionError(HeadwiseError):
    """Attention that cannot be intercepted, or an interception inside another."""


class SdpaArguments(NamedTuple):
    """The arguments of scaled_dot_product_attention with batch and head axes, and its mask as a `Mask`."""

    q: Tensor  # (b, h, m, k)
    k: Tensor  # (b, g, n, k), g key/value heads
    v: Tensor  # (b, g, n, d)
    mask: Mask
    scale: float


def read_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaArguments:
    """Read a call: read_sdpa(*args, **kwargs) for scaled_dot_product_attention(*args, **kwargs)."""
    q, k, v = (four_axes(x) for x in (query, key, value))
    mask = Mask.from_sdpa(attn_mask, is_causal, q.shape[-2], k.shape[-2], device=q.device)
    return SdpaArguments(q, k, v, mask, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale))


def four_axes(x: Tensor) -> Tensor:
    """x as (b, h, rows, width)."""
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x.reshape(*(1,) * (4 - x.dim()), *x.shape)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: its site in the model and its operands."""

    site: str  # name of the module that made the call, with @i for its i-th use in one forward pass
    module: nn.Module
    kind: str  # "self" or "cross"
    q: Tensor  # (b, h, m, k)
    k: Tensor  # (b, h, n, k)
    v: Tensor  # (b, h, n, d)
    mask: Mask  # with batch axes (b, h)
    scale: float
    groups: int  # key/value heads before they were repeated for grouped queries

    @property
    def causal(self) -> bool:
        return self.mask.hides_later_keys()


Answer = Callable[[str, Callable[..., Tensor], tuple, dict], Tensor]
"""(site, the original function, its args, its kwargs) -> the output that the model gets instead."""


@contextlib.contextmanager
def intercept(
    model: nn.Module, see: Callable[[AttentionCall], None] | None = None, *, answer: Answer | None = None
) -> Iterator[None]:
    """Call `see` for every attention call of `model` in this thread while the context is open; always undone.

    `answer` is called instead of the function, with gradients.  Attention that `see` or `answer` compute themselves is
    not intercepted.
    """
    if _own() is not None:
        raise InterceptionError("intercept: another interception is open in this thread; close it first")
    _check_runs_here(model)
    interception = _Interception(model, see, answer)
    try:
        _REPLACED.open(interception)
        yield
    finally:
        _REPLACED.close(interception)
    interception.check_threads()


class _Running(NamedTuple):
    """A call of a module that is running: the arguments that it was called with are in the frame."""

    name: str
    module: nn.Module
    frame: FrameType

    @property
    def args(self) -> tuple:
        return self.frame.f_locals["args"]

    @property
    def kwargs(self) -> dict:
        return self.frame.f_locals["kwargs"]


class _Interception:
    """One open context: the names of the modules of its model, and what it has seen."""

    def __init__(self, model: nn.Module, see: Callable[[AttentionCall], None] | None, answer: Answer | None) -> None:
        self.model, self.see, self.answer = model, see, answer
        self.names = {id(module): name for name, module in model.named_modules()}
        self.uses: Counter[str] = Counter()  # attention calls of each module in the present forward pass
        self.present_pass: FrameType | None = None
        self.busy = False
        self.closed = False
        self.attended: set[str] = set()
        self.attended_elsewhere: set[str] = set()  # in threads that run a part of the model, but not the model

    def running(self, frame: FrameType | None) -> list[_Running]:
        """The calls of modules of the model on the stack of `frame`, innermost first."""
        calls = []
        while frame is not None:
            if frame.f_code is _MODULE_CALL:
                module = frame.f_locals["self"]
                name = self.names.get(id(module))
                if name is not None:
                    calls.append(_Running(name, module, frame))
            frame = frame.f_back
        return calls

    def attend(self, calls: list[_Running], original: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """The output of one attention call of the model."""
        self.busy = True  # calls inside `see` and `answer` are not the model's
        try:
            site = self._site(calls)
            if self.see is not None:
                with torch.no_grad():
                    self.see(_attention_call(calls[0], site, args, kwargs))
            if self.answer is not None:
                return self.answer(site, original, args, kwargs)
            return original(*args, **kwargs)
        finally:
            self.busy = False

    def _site(self, calls: list[_Running]) -> str:
        """The name of the module that makes this call, with @i for its i-th use in one forward pass."""
        if calls[-1].frame is not self.present_pass:
            self.present_pass = calls[-1].frame
            self.uses.clear()
        name = calls[0].name
        self.attended.add(name)
        self.uses[name] += 1
        return name if self.uses[name] == 1 else f"{name}@{self.uses[name]}"

    def note_elsewhere(self, frame: FrameType) -> None:
        """Note an attention call in another thread, unless that thread runs the whole model for itself."""
        calls = self.running(frame)
        if calls and calls[-1].module is not self.model:
            self.attended_elsewhere.add(calls[0].name)

    def check_threads(self) -> None:
        """Raise InterceptionError if the model computed a part of its attention in threads of its own."""
        unseen = sorted(self.attended_elsewhere - self.attended)
        if unseen:
            raise InterceptionError(
                f"{type(self.model).__name__} computed attention in another thread at {', '.join(unseen[:3])}"
                f"{' …' if len(unseen) > 3 else ''}, where it is not seen; run all of the model in one thread"
            )


def _own() -> _Interception | None:
    """The interception that is open in this thread."""
    interception = getattr(_THREAD, "interception", None)
    return None if interception is None or interception.closed else interception


class _ReplacedFunctions:
    """The functions of torch that are replaced while any interception is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[_Interception, ...] = ()
        self._places: list[tuple[Any, str, Any, Any]] = []  # (namespace, name, original, replacement)

    def open(self, interception: _Interception) -> None:
        with self._lock:
            if not self._open:
                functions = (
                    (F, "scaled_dot_product_attention", self._attention),
                    (F, "multi_head_attention_forward", self._multi_head_attention),
                    (torch.backends.mha, "get_fastpath_enabled", self._fastpath_enabled),
                )
                for namespace, name, replacing in functions:
                    original = getattr(namespace, name)
                    self._replace(namespace, name, original, functools.wraps(original)(replacing(original)))
            _, _, original, replacement = self._places[0]
            for namespace, name in _imported_names(interception.model, original):
                self._replace(namespace, name, original, replacement)
            self._open = (*self._open, interception)
            _THREAD.interception = interception

    def close(self, interception: _Interception) -> None:
        interception.closed, interception.present_pass = True, None
        if _own() is None:
            _THREAD.interception = None
        with self._lock:
            self._open = tuple(each for each in self._open if each is not interception)
            while self._places and not self._open:
                namespace, name, original, replacement = self._places[-1]
                if getattr(namespace, name) is replacement:  # not replaced by other code in the meantime
                    setattr(namespace, name, original)
                self._places.pop()

    def _replace(self, namespace: Any, name: str, original: Any, replacement: Any) -> None:
        self._places.append((namespace, name, original, replacement))
        setattr(namespace, name, replacement)

    def _attention(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attention(*args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            own = _own()
            if own is None:
                for interception in self._open:
                    interception.note_elsewhere(sys._getframe(1))
            elif not own.busy and (calls := own.running(sys._getframe(1))):
                return own.attend(calls, original, args, kwargs)
            return original(*args, **kwargs)

        return attention

    def _multi_head_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """By default torch's own module returns weights, on a path that never calls the function for attention."""

        def multi_head_attention(*args: Any, **kwargs: Any) -> Any:
            own = None if torch.compiler.is_compiling() else _own()
            calls = [] if own is None or own.busy else own.running(sys._getframe(1))
            if calls and "need_weights" not in calls[0].kwargs and len(calls[0].args) < 5:
                kwargs["need_weights"] = False
            return original(*args, **kwargs)

        return multi_head_attention

    def _fastpath_enabled(self, original: Callable[[], bool]) -> Callable[[], bool]:
        """The fused kernels for whole layers do not call the function for attention either."""

        def fastpath_enabled() -> bool:
            return original() if torch.compiler.is_compiling() or _own() is None else False

        return fastpath_enabled


_MODULE_CALL = nn.Module._call_impl.__code__
_THREAD = threading.local()
_REPLACED = _ReplacedFunctions()


def _imported_names(model: nn.Module, original: Callable) -> list[tuple[Any, str]]:
    """(namespace, name) of Python modules of the model that imported the function by name."""
    places: list[tuple[Any, str]] = []
    for source in {type(module).__module__ for module in model.modules()}:
        namespace = sys.modules.get(source)
        if namespace is not None and namespace is not F:
            places += [(namespace, name) for name, value in list(vars(namespace).items()) if value is original]
    return places


def _check_runs_here(model: nn.Module) -> None:
    """Raise InterceptionError for wrappers whose attention does not run in this thread, or not in Python."""
    for name, module in model.named_modules():
        where = f"{type(model).__name__}.{name}" if name else type(model).__name__
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise InterceptionError(f"{where} runs copies of its module in other threads; give {where}.module instead")
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise InterceptionError(
                f"{where} is compiled, so its attention cannot be intercepted; give the model as it was before "
                "torch.compile"
            )


def _attention_call(running: _Running, site: str, args: tuple, kwargs: dict) -> AttentionCall:
    q, k, v, mask, scale = read_sdpa(*args, **kwargs)
    q, k, v = q.detach(), k.detach(), v.detach()
    kind, groups = _kind(site, running.args, running.kwargs, q, k), k.shape[1]
    if groups != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    return AttentionCall(site, running.module, kind, q, k, v, mask, scale, groups)


def _kind(name: str, args: tuple, kwargs: dict, query: Tensor, key: Tensor) -> str:
    """Cross-attention has keys from another sequence: recognised by a second input, the lengths, or the name."""
    other = (kwargs.get(word) for word in ("encoder_hidden_states", "key_value_states", "context", "memory"))
    if any(isinstance(x, Tensor) for x in other):
        return "cross"
    states = [x.shape for x in args[:2] if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]
    if len(states) == 2 and states[0] != states[1]:
        return "cross"
    words = name.lower().replace("_", "")
    if any(word in words for word in ("crossattention", "encdec", "encoderattn", "crossattn", "multiheadattn")):
        return "cross"
    return "self" if query.shape[-2] == key.shape[-2] else "cross"


def nothing_seen(model: nn.Module) -> InterceptionError:
    """The error for a model that never called scaled_dot_product_attention."""
    classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    names = ", ".join(classes) or "no class with 'attention' in its name"
    return InterceptionError(
        f"{type(model).__name__} never called scaled_dot_product_attention (found: {names}); load it with "
        'attn_implementation="sdpa", or, if its attention is written by hand, compute it through '
        "headwise.models.attention(q, k, v, attn_mask) in its forward"
    )
