"""Attention functions of headwise as implementations of transformers' models.

A family without sdpa has only eager attention, which adds the mask that it is given and never asks a module whether it
is causal; parts that compute attention by hand add the same mask.  A family without flash attention may slice, join or
change masks, which no layer of it ever had other than as (b, 1, m, n).  So each function is registered three times:
under its name for families with sdpa and flash attention, with masks of its own, which may be shorter; for families
with sdpa alone with whole masks; and for all others with eager attention's masks, which say everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

WHOLE = "_whole"
"""Ending of the name under which a function is registered for families that have sdpa, but no flash attention."""

EAGER = "_eager"
"""Ending of the name under which a function is registered for families that have only eager attention."""

CAUSAL = "headwise_causal"
"""Attribute of a mask that hides later keys: in that of a single query this cannot be seen."""

INTERNAL = "_attn_implementation_internal"


def register(
    name: str, attention: Callable[..., Any], mask: Callable[..., Any], whole_mask: Callable[..., Any] | None = None
) -> None:
    """Make `attention` and its masks known to transformers; may be called repeatedly.

    whole_mask   makes masks (b, 1, m, n) or none, if `mask` may make others
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    for ending, function in (("", mask), (WHOLE, whole_mask or mask)):
        AttentionInterface.register(name + ending, attention)
        AttentionMaskInterface.register(name + ending, function)
    known = AttentionInterface().get(name + EAGER)
    if getattr(known, "args", None) != (attention,):  # the same object as before, if it may be
        AttentionInterface.register(name + EAGER, partial(_as_the_mask_says, attention))
    AttentionMaskInterface.register(name + EAGER, _eager_mask)


def use(model: Any, name: str) -> Callable[[], None]:
    """Set a registered function as the implementation of all parts of `model`; returns the function that undoes it."""
    undo = implementations(model)
    takes_short = all(getattr(part, "_supports_flash_attn", True) for part in model.modules())
    model.set_attn_implementation(name + (EAGER if not supports_sdpa(model) else "" if takes_short else WHOLE))
    return undo


def supports_sdpa(model: Any) -> bool:
    """Whether all parts of `model` may compute attention by torch's function, with masks that are left out."""
    return all(getattr(part, "_supports_sdpa", True) for part in model.modules())


def implementations(model: Any) -> Callable[[], None]:
    """The function that gives every part of `model` the attention implementation that it has now."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    queue = list(configs.values())
    for config in queue:
        for name in getattr(config, "sub_configs", None) or ():
            part = getattr(config, name, None)
            if part is not None and id(part) not in configs:
                configs[id(part)] = part
                queue.append(part)
    before = [(config, getattr(config, INTERNAL)) for config in configs.values() if hasattr(config, INTERNAL)]

    def undo() -> None:
        for config, value in before:
            setattr(config, INTERNAL, value)

    return undo


def _as_the_mask_says(attention: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`attention` as eager attention is called: (module, q, k, v, mask), causal if the mask is."""
    mask = args[4] if len(args) > 4 else options.get("attention_mask")
    return attention(*args, **{**options, "is_causal": getattr(mask, CAUSAL, False)})


def _eager_mask(
    *sizes: Any, kv_length: int, mask_function: Callable[..., Any] | None = None, **options: Any
) -> Tensor | None:
    """(b, 1, m, n), added to the scores, marked as CAUSAL if keys after a query are hidden; None: every key."""
    from transformers.masking_utils import causal_mask_function, eager_mask

    function: Any = causal_mask_function if mask_function is None else mask_function
    made: Tensor | None = eager_mask(*sizes, kv_length=kv_length, mask_function=function, **options)
    if made is not None and kv_length > 1 and not torch.compiler.is_compiling():
        first, second = torch.tensor([0, 1], device=made.device)
        setattr(made, CAUSAL, not bool(function(first, first, first, second)))
    return made
