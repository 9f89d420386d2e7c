"""Attention as transformers calls it, with the HeadDimensions of the calling module.

`attention` is registered as an attention implementation of transformers.  A hook before the forward of each attention
module notes its input and puts a `WidenedCache` in the place of a cache, so that keys are cached at their new width.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.intercept import running_calls
from headwise.models.pretrained import attention_functions
from headwise.models.pretrained.derived_models import default_probe
from headwise.models.run import as_it_was, run_model
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.operators.masks import Mask

NAME = "headwise_widths"
"""Of the attention implementation, of the submodule that holds the HeadDimensions, and of the widths in the config."""

CONTEXTS = ("key_value_states", "encoder_hidden_states")
"""Arguments of attention modules of transformers that keys are computed from, where it is not the module's input."""


class _Running(threading.local):
    """What attention modules that run in this thread were called with: id of the module -> (x, context, cached)."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[Tensor, Tensor, bool]] = {}


_RUNNING = _Running()


@final
@dataclass(frozen=True, eq=False)
class WidenedCall:
    """One attention call: operands as the softmax sees them, k and v with one head for each group, and the mask."""

    x: Tensor
    context: Tensor
    q: Tensor  # (b, h, m, base): the module's own dimensions that are left
    k: Tensor  # (b, h_kv, n, base)
    wide_q: Tensor
    wide_k: Tensor
    v: Tensor
    mask: Mask
    scaling: float


Observer = Callable[[WidenedCall, Tensor], None]
"""(the call, its output (b, m, h, d))"""


@final
@dataclass(frozen=True)
class ResizableSite:
    """An attention module that calls the interface, and the sizes of its heads."""

    name: str
    module: nn.Module
    heads: int
    key_heads: int
    key_width: int
    inputs: tuple[int, int]


def register() -> None:
    """Register `attention` with transformers, with the masks of its sdpa; may be called repeatedly."""
    from transformers.masking_utils import sdpa_mask

    attention_functions.register(NAME, attention, sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (b, h, m, k), key (b, h_kv, n, k or k'), value (b, h_kv, n, d) -> (b, m, h, d)"""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dimensions: HeadDimensions | None = getattr(module, NAME, None)
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    options = {"scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__}: {name} changes the softmax, so its heads keep their width"
            )
    if dimensions is None:
        _note_site(module, query, key)
        if getattr(module, "config", None) is not None and getattr(module.config, NAME, None):
            raise InputError(
                f"{type(module).__name__}: the config says that heads were widened or narrowed, but the module has no "
                "HeadDimensions: a stock class has loaded the files; load them with AutoModel after `import headwise`"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, **options, **kwargs)
    x, context, wide_q, wide_k = _widened(module, dimensions, query, key)
    d = value.shape[-1]
    if d < dimensions.width:  # torch's fused kernels need one width
        padded = F.pad(value, (0, dimensions.width - d))
    else:
        padded = value
        wide_q, wide_k = (F.pad(x, (0, d - dimensions.width)) for x in (wide_q, wide_k))
    out, _ = sdpa_attention_forward(module, wide_q, wide_k, padded, attention_mask, dropout, **options, **kwargs)
    out = out[..., :d].contiguous()
    observer: Observer | None = getattr(dimensions, "observer", None)
    if observer is not None:
        flag = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[-2] > 1
        mask = Mask.from_transformers(attention_mask, flag, query.shape[-2], key.shape[-2])
        if position_bias is not None:
            mask = mask.with_bias(position_bias if mask.attn_bias is None else position_bias + mask.attn_bias)
        own_q, own_k = wide_q[..., : dimensions.base], wide_k[..., : dimensions.base]
        observer(WidenedCall(x, context, own_q, own_k, wide_q, wide_k, value, mask, scaling), out)
    return out, None


def widened(module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the widths that growth or shrinking gave the module: what other attention functions use."""
    dimensions: HeadDimensions | None = getattr(module, NAME, None)
    return (query, key) if dimensions is None else _widened(module, dimensions, query, key)[2:]


def _widened(
    module: nn.Module, dimensions: HeadDimensions, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What queries and keys are computed from, and both with their new widths."""
    x, context, cached = _RUNNING.inputs.pop(id(module))  # keys that come from a WidenedCache have their new width
    return x, context, dimensions.queries(query, x), key if cached else dimensions.keys(key, context)


class WidenedCache:
    """A cache of transformers in which one layer stores its keys at their new width."""

    def __init__(self, cache: Any, dimensions: HeadDimensions, context: Tensor) -> None:
        self._cache, self._dimensions, self._context = cache, dimensions, context

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update(self._dimensions.keys(key_states, self._context), value_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def attach(module: nn.Module, dimensions: HeadDimensions) -> None:
    """Give an attention module its HeadDimensions, on the device and in the dtype of its weights."""
    if getattr(module, NAME, None) is not None:
        raise InputError(f"attach: {type(module).__name__} has HeadDimensions already")
    like = next(module.parameters())
    module.add_module(NAME, dimensions.to(device=like.device, dtype=like.dtype))
    module.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    dimensions: HeadDimensions | None = getattr(module, NAME, None)
    if dimensions is None:
        return None
    x, context = _inputs(module, args, kwargs)
    _RUNNING.inputs[id(module)] = x, context, False
    if not any(dimensions.added) and dimensions.kept is None:
        return None

    def widened(value: Any) -> Any:
        if not hasattr(value, "update") or not hasattr(value, "get_seq_length"):
            return value
        _RUNNING.inputs[id(module)] = x, context, True
        if hasattr(value, "self_attention_cache"):
            both = copy.copy(value)
            both.self_attention_cache = WidenedCache(value.self_attention_cache, dimensions, context)
            both.cross_attention_cache = WidenedCache(value.cross_attention_cache, dimensions, context)
            return both
        return WidenedCache(value, dimensions, context)

    return tuple(map(widened, args)), {name: widened(value) for name, value in kwargs.items()}


@functools.cache
def _signature(kind: type) -> inspect.Signature:
    return inspect.signature(kind.forward)


def _inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """The input of an attention module, and the tensor that its keys are computed from."""
    given = _signature(type(module)).bind_partial(module, *args, **kwargs).arguments
    named = {**given, **given.get("kwargs", {})}
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == 3]
    x = named.get("hidden_states", tensors[0] if tensors else None)
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise UnsupportedError(
            f"{type(module).__name__}: its input is not one tensor (b, n, d), so it cannot be resized"
        )
    context = next((named[name] for name in CONTEXTS if named.get(name) is not None), x)
    return x, context


class _Probe(threading.local):
    """What `attention_sites` has found in this thread, and the names of the modules; None: it does not run."""

    sites: list[ResizableSite] | None = None
    names: dict[int, str]


_PROBE = _Probe()


def _note_site(module: nn.Module, query: Tensor, key: Tensor) -> None:
    """While `attention_sites` runs a probe: the sizes of the module that makes this call."""
    sites = _PROBE.sites
    if sites is None or any(site.module is module for site in sites):
        return
    calls = running_calls(_PROBE.names, sys._getframe(2))
    running = next((call for call in calls if call.module is module), None)
    if running is None:
        return
    try:
        x, context = _inputs(module, running.args, running.kwargs)
    except UnsupportedError:
        return
    sizes = (query.shape[1], key.shape[1], query.shape[-1], (x.shape[-1], context.shape[-1]))
    sites.append(ResizableSite(running.name, module, *sizes))


def attention_sites(model: Any, probe: dict[str, Any] | None = None) -> list[ResizableSite]:
    """The attention modules of a transformers model that call the interface on `probe`, in order.

    The model is left with `attention` as its implementation, which computes what sdpa does.
    """
    register()
    if not model._can_set_attn_implementation():
        raise UnsupportedError(
            f"{type(model).__name__} computes attention by hand instead of through transformers' attention interface, "
            "so its heads keep their width"
        )
    probe = default_probe(model, 8) if probe is None else probe
    if probe is None:
        raise InputError(
            f"{type(model).__name__} takes {model.main_input_name}; pass probe=, a batch of what it takes, so that its "
            "attention modules can be found"
        )
    undo = attention_functions.use(model, NAME)
    _PROBE.sites = found = []
    _PROBE.names = {id(module): name for name, module in model.named_modules()}
    try:
        with as_it_was(model), torch.no_grad():
            run_model(model, probe)
    except BaseException:
        undo()
        raise
    finally:
        _PROBE.sites, _PROBE.names = None, {}
    if not found:
        undo()
    return found
