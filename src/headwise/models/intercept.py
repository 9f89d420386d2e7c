"""See every scaled_dot_product_attention call of any model, with names from its module tree, and leave no trace.

    with intercept(model, see):          # see(call) is called for every attention call, in order
        model(**batch)

`call.scores` are the scores the model really uses: after rotary embeddings, with grouped queries, its own scale and
masks.  One function of torch is replaced while the context is open; no family of models needs an adapter.
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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask


class InterceptionError(HeadwiseError):
    """Attention that cannot be seen, or an interception inside another."""


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: its place in the model and its operands, heads as the axis before the last two."""

    name: str  # of the module that made the call, with @i for its i-th use in one forward pass
    module: nn.Module
    kind: str  # "self" or "cross"
    scores: Scores  # q (b, h, m, k), k (b, h, n, k)
    v: Tensor  # (b, h, n, d)
    groups: int  # key/value heads before they were repeated for grouped queries
    causal: bool


@dataclass
class _State:
    stack: list[tuple[str, nn.Module, tuple, dict]]
    uses: Counter
    calls: int = 0
    busy: bool = False


Answer = Callable[[str, Callable[..., Tensor], tuple, dict], Tensor]
"""(site, the function itself, its arguments) -> what the model gets instead."""

_OPEN = threading.Lock()
"""One interception at a time in a process: the function it replaces belongs to everybody."""


@contextlib.contextmanager
def intercept(
    model: nn.Module, see: Callable[[Call], None] | None = None, *, answer: Answer | None = None
) -> Iterator[None]:
    """Call `see` for every attention call of `model` while the context is open; always undone, also after an error.

    `answer` is called in place of the function, with gradients; what either of the two computes is not seen.
    """
    if not _OPEN.acquire(blocking=False):
        raise InterceptionError(
            "intercept: another interception is open in this process (nested or in another thread); close it first"
        )
    original = F.scaled_dot_product_attention
    state, owner = _State([], Counter()), threading.get_ident()

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != owner:
            raise InterceptionError("intercept: the model ran in another thread than the one that opened the context")
        if not state.busy and state.stack:
            state.busy = True  # what `see` and `answer` compute is not the model's
            try:
                site = _site(state)
                if see is not None:
                    with torch.no_grad():
                        see(_call(state, site, *args, **kwargs))
                if answer is not None:
                    return answer(site, original, args, kwargs)
            finally:
                state.busy = False
        return original(*args, **kwargs)

    with contextlib.ExitStack() as undo:
        undo.callback(_OPEN.release)
        for place in _places(model, original):
            setattr(place[0], place[1], seen)
            undo.callback(setattr, place[0], place[1], original)
        if torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            undo.callback(torch.backends.mha.set_fastpath_enabled, True)
        for name, module in model.named_modules():
            enter = functools.partial(_enter, state, name)
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=False),
                module.register_forward_hook(functools.partial(_leave, state), always_call=True),
            ):
                undo.callback(handle.remove)
        yield


def _places(model: nn.Module, original: Callable) -> list[tuple[Any, str]]:
    """Where the function is looked up: torch itself, and modules that imported its name."""
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
    # weights that nobody asked for by name would send torch's own module down a path that never calls the function
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
    state.calls += 1
    state.uses[name] += 1
    return name if state.uses[name] == 1 else f"{name}@{state.uses[name]}"


def _call(
    state: _State,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    _, module, args, kwargs = state.stack[-1]
    q, k, v = (x.detach().reshape(*(1,) * (4 - x.dim()), *x.shape) for x in (query, key, value))
    groups = k.shape[-3]
    if groups != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // groups, dim=-3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    keep, bias = None, None
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
        if mask.dtype == torch.bool:
            keep = mask
        else:
            # masks of transformers hold the most negative number of the dtype instead of -inf
            keep = mask > torch.finfo(mask.dtype).min / 2
            bias = None if bool(((mask == 0) | ~keep).all()) else torch.where(keep, mask, 0.0)
    m, n = q.shape[-2], k.shape[-2]
    ahead, causal = (0 if is_causal else None), is_causal
    if keep is not None and bool(keep.all()):
        keep = None
    if keep is not None and m > 1 and keep.shape[-2] == m:
        causal = not bool(keep.triu(n - m + 1).any())
        if causal and bool((keep == keep.new_ones(m, n).tril(n - m)).all()):
            ahead, keep = n - m, None  # the mask says nothing more than that
    scores = Scores(q, k, float(scale), Mask(m, n, ahead is not None, None, keep, bias, ahead))
    return Call(name, module, _kind(name, args, kwargs, query, key), scores, v, groups, causal)


def _kind(name: str, args: tuple, kwargs: dict, query: Tensor, key: Tensor) -> str:
    """Cross-attention reads its keys from elsewhere: told by a second input, by the lengths, or by the name."""
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


def attention_classes(model: nn.Module) -> list[str]:
    """Names of the model's classes that sound like attention, for the error when none of them was seen."""
    return sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})


def nothing_seen(model: nn.Module) -> InterceptionError:
    """The sentence for a model that never reached scaled_dot_product_attention."""
    found = attention_classes(model)
    names = ", ".join(found) if found else "no class with 'attention' in its name"
    return InterceptionError(
        f"{type(model).__name__} never called scaled_dot_product_attention (found: {names}); load it with "
        'attn_implementation="sdpa", or, if its attention is written by hand, compute it through '
        "headwise.models.attention(q, k, v, mask) in its forward"
    )
