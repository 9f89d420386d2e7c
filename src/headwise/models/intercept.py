"""Intercept every scaled_dot_product_attention call of a model, named after the module that makes it.

    with intercept(model, see):          # see(call) is called for every attention call, in order
        model(**batch)

A call holds the q, k, v, scale and mask that the model uses: after rotary embeddings, with grouped queries.  One
function of torch is replaced while the context is open, so no model family needs code of its own here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass
class _State:
    stack: list[tuple[str, nn.Module, tuple, dict]] = field(default_factory=list)  # modules that are running
    uses: Counter = field(default_factory=Counter)
    busy: bool = False


Answer = Callable[[str, Callable[..., Tensor], tuple, dict], Tensor]
"""(site, the original function, its args, its kwargs) -> the output that the model gets instead."""

_OPEN = threading.Lock()
"""One interception at a time in a process, because it replaces a function of torch."""


@contextlib.contextmanager
def intercept(
    model: nn.Module, see: Callable[[AttentionCall], None] | None = None, *, answer: Answer | None = None
) -> Iterator[None]:
    """Call `see` for every attention call of `model` while the context is open; always undone, also after an error.

    `answer` is called instead of the function, with gradients.  Attention that `see` or `answer` compute themselves is
    not intercepted.
    """
    if not _OPEN.acquire(blocking=False):
        raise InterceptionError(
            "intercept: another interception is open in this process (nested or in another thread); close it first"
        )
    original = F.scaled_dot_product_attention
    state, owner = _State(), threading.get_ident()

    @functools.wraps(original)
    def intercepted(*args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != owner:
            raise InterceptionError("intercept: the model ran in another thread than the one that opened the context")
        if not state.busy and state.stack:
            state.busy = True  # calls inside `see` and `answer` are not the model's
            try:
                site = _site(state)
                if see is not None:
                    with torch.no_grad():
                        see(_attention_call(state, site, args, kwargs))
                if answer is not None:
                    return answer(site, original, args, kwargs)
            finally:
                state.busy = False
        return original(*args, **kwargs)

    with contextlib.ExitStack() as undo:
        undo.callback(_OPEN.release)
        for namespace, name in _places(model, original):
            setattr(namespace, name, intercepted)
            undo.callback(setattr, namespace, name, original)
        if torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            undo.callback(torch.backends.mha.set_fastpath_enabled, True)
        for name, module in model.named_modules():
            enter, leave = functools.partial(_enter, state, name), functools.partial(_leave, state)
            undo.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def _places(model: nn.Module, original: Callable) -> list[tuple[Any, str]]:
    """(namespace, name) where the function is looked up: torch itself, and Python modules that imported its name."""
    places: list[tuple[Any, str]] = [(F, "scaled_dot_product_attention")]
    for source in {type(module).__module__ for module in model.modules()}:
        namespace = sys.modules.get(source)
        if namespace is None or namespace is F:
            continue
        places += [(namespace, name) for name, value in vars(namespace).items() if value is original]
    return places


def _enter(state: _State, name: str, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if not state.stack:
        state.uses.clear()  # a new forward pass
    state.stack.append((name, module, args, kwargs))
    # by default torch's own module returns weights, on a path that never calls the function
    if isinstance(module, nn.MultiheadAttention) and "need_weights" not in kwargs and len(args) < 5:
        return args, {**kwargs, "need_weights": False}
    return None


def _leave(state: _State, module: nn.Module, args: tuple, output: Any) -> None:
    # an exception may have skipped inner hooks: unwind to this module
    while state.stack and state.stack.pop()[1] is not module:
        pass


def _site(state: _State) -> str:
    """The name of the module that makes this call, with @i for its i-th use in one forward pass."""
    name = state.stack[-1][0]
    state.uses[name] += 1
    return name if state.uses[name] == 1 else f"{name}@{state.uses[name]}"


def _attention_call(state: _State, site: str, args: tuple, kwargs: dict) -> AttentionCall:
    _, module, module_args, module_kwargs = state.stack[-1]
    q, k, v, mask, scale = read_sdpa(*args, **kwargs)
    q, k, v = q.detach(), k.detach(), v.detach()
    kind, groups = _kind(site, module_args, module_kwargs, q, k), k.shape[1]
    if groups != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    return AttentionCall(site, module, kind, q, k, v, mask, scale, groups)


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
