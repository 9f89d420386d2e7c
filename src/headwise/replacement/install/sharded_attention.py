"""Models of transformers, rewritten or not, on slices of a sequence that other processes hold the rest of.

    with sequence_parallel_model(model):
        out = model(ids[:, start:stop], position_ids=positions, use_cache=False)

Every attention call of the model becomes `sequence_parallel` of its operators: softmax, or in a rewritten model the
kinds of its heads, one call for each group of equal heads.  All else in a transformer treats positions one by one, if
it is told which ones they are: pass `position_ids`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.distributed import sequence_parallel
from headwise.distributed.collectives import Ranks
from headwise.errors import InputError, UnsupportedError
from headwise.models.pretrained import attention_functions
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.widths.widened_attention import widened
from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.operators.base import AttentionOperator
from headwise.operators.masks import Mask
from headwise.operators.softmax import softmax
from headwise.replacement.install import transformers_attention as interface
from headwise.replacement.install.mixed_heads import HeadGroup, MixedHeads
from headwise.replacement.install.operator_heads import OperatorHeads
from headwise.replacement.install.sharded_inputs import ShardedInputs, told
from headwise.replacement.kinds import Choice, HeadInputs

NAME = "headwise-sequence-parallel"


@contextmanager
def sequence_parallel_model(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, zigzag: bool = False
) -> Iterator[nn.Module]:
    """`model` with its attention over the slices of all ranks of `group`; afterwards it is as it was.

    Inputs are this rank's positions: `position_ids` says which, `attention_mask` (b, n) has its own padding, or None on
    all ranks.  `zigzag` is that of `sequence_parallel`.  Caches and labels are not supported.  With several ranks the
    first call tries the model on a few tokens of each rank: see `sharded_inputs`.
    """
    if not is_pretrained(model):
        raise InputError(
            f"sequence_parallel_model: needs a model of transformers, but got {type(model).__name__}; for layers of "
            "headwise.nn use build=sequence_parallel(...)"
        )
    if not attention_functions.supports_sdpa(model):
        raise UnsupportedError(
            f"sequence_parallel_model: {type(model).__name__} has only eager attention, which is causal where its mask "
            "(b, 1, m, n) says so; no rank has such a mask: run it with one process"
        )
    parallel = partial(sequence_parallel, group=group, zigzag=zigzag)
    ranks = parallel(softmax).ranks  # complains about the group before anything is changed
    attention_functions.register(NAME, partial(_attention, parallel), partial(_mask, ranks))
    undo = attention_functions.use(model, NAME)
    inputs = ShardedInputs(model, ranks, zigzag)
    try:
        yield model
    finally:
        inputs.close()
        undo()


def _attention(
    parallel: Any,
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
    """query (b, h, m, k), key and value (b, h_kv, n, ·) of this rank -> (b, m, h, d)"""
    owner = type(module).__name__
    refused = {name: why for name, why in interface.CHANGES.items() if kwargs.get(name) is not None}
    if position_bias is not None:
        refused["position_bias"] = "a bias for pairs of positions"
    if dropout:
        refused["dropout"] = f"attention dropout of {dropout:g} (call model.eval())"
    if query.shape[-2] != key.shape[-2]:
        refused["past_key_values"] = "a cache (pass use_cache=False), or attention to another sequence,"
    if attention_mask is not None and attention_mask.dim() != 2:
        refused["attention_mask"] = f"a mask that the model makes itself, {tuple(attention_mask.shape)},"
    for name, why in refused.items():
        raise UnsupportedError(f"{owner}: {why} ({name}) is not supported in sequence_parallel_model")
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    query, key = widened(module, query, key)
    masks: dict[str, Any] = {}
    if bool(getattr(module, "is_causal", True) if is_causal is None else is_causal):
        masks["causal"] = True
    if attention_mask is not None:
        masks["key_mask"] = attention_mask.unsqueeze(1)
    heads = getattr(module, interface.NAME, None)
    values = repeat_heads(value, query, owner)
    if isinstance(heads, OperatorHeads):
        out = parallel(_replaced(heads, scale))(query, repeat_heads(key, query, owner), **masks)(values)
        return out.transpose(1, 2).contiguous(), None
    if not isinstance(heads, MixedHeads) or heads.replaced is None:
        out = parallel(partial(softmax, scale=scale))(query, key, **masks)(values)
        return out.transpose(1, 2).contiguous(), None
    shared, outs, order = query.shape[1] // key.shape[1], [], []
    for group in heads._groups():
        build = parallel(_builder(heads, group, scale))
        outs.append(build(group.take(query), group.take_shared(key, shared), **masks)(group.take(values)))
        order += group.heads
    out = torch.cat(outs, dim=1).index_select(1, torch.tensor(order, device=query.device).argsort())
    return out.transpose(1, 2).contiguous(), None


def _builder(heads: MixedHeads, group: HeadGroup, scale: float) -> Callable[..., AttentionOperator]:
    """`_operator` of the group, with a name for errors."""
    _check_rotations(group.choice)

    def build(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
        return _operator(heads, group, scale, q, k, **masks)

    build.__name__ = str(group.choice)
    return build


def _replaced(heads: OperatorHeads, scale: float) -> Callable[..., AttentionOperator]:
    """The operator that `replace` put into a layer."""
    _check_rotations(heads.choice)

    def build(q: Tensor, k: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> AttentionOperator:
        if key_mask is not None and heads.from_first_key:
            raise UnsupportedError(f"{heads.where}: {name} {FROM_FIRST_KEY}")
        return heads.operator(HeadInputs(q, k, Mask(q.shape[-2], k.shape[-2], causal, key_mask), scale))

    name = str(heads.choice) if isinstance(heads.choice, Choice) else getattr(heads.choice, "__name__", "operator")
    build.__name__ = name
    return build


def _check_rotations(choice: object) -> None:
    if isinstance(choice, Choice) and choice.kind == "hashed":
        raise UnsupportedError(
            f"{choice}: draws other rotations on every rank; choose another kind, or use one process"
        )


FROM_FIRST_KEY = (
    "counts positions from the first key that is not padding, which may be on another rank; pass sequences without "
    "padding"
)


def _operator(
    heads: MixedHeads,
    group: HeadGroup,
    scale: float,
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> AttentionOperator:
    """The operator of a group of heads, or softmax at lengths at which the plan keeps it."""
    if group.choice.kind == "softmax" or heads.runs_exact(k.shape[-2]):
        return softmax(q, k, scale=scale, causal=causal, key_mask=key_mask)
    if key_mask is not None and group.choice.definition.from_first_key:
        raise UnsupportedError(f"{group.choice}: {FROM_FIRST_KEY}")
    mask = Mask(q.shape[-2], k.shape[-2], causal, key_mask)
    return group.choice.operator(HeadInputs(q, k, mask, scale), group.tensors)


def _mask(
    ranks: Ranks,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding (b, n) as it was given, None if no rank has any; causality is the module's."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    problem = None
    if local_size is not None or mask_function not in (causal_mask_function, bidirectional_mask_function):
        problem = (
            "sequence_parallel_model: only causal attention and attention to all keys are supported, but this model "
            "has a sliding window, a mask of its own, or position_ids that jump: pass an attention_mask if they are "
            "of one sequence, else run it with one process"
        )
    padded = attention_mask is not None and not bool((attention_mask != 0).all())
    # position_ids may jump, and there may be padding, on one rank only
    return attention_mask.bool() if any(told(problem, padded, ranks)) and attention_mask is not None else None
