"""What is measured without being promised: room in half precision, symmetries, and the bound on rank collapse."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, UnsupportedError
from headwise.ledger.audit import audit_weights
from headwise.ledger.model_audit.audited_model import (
    AuditedModel,
    DoesNotApplyError,
    NotTriedError,
    main_output,
    untried,
)
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.models.gate import one_line
from headwise.models.intercept import AttentionCall, intercept
from headwise.models.run import OwnHook, placed

HEADROOM, HALF, BRAIN = "room in float16", "float16 against float32", "bfloat16 against float32"
PERMUTATION, TRANSLATION, COLLAPSE = "permutation symmetry", "translation symmetry", "rank-collapse bound"
LARGEST_HALF = 65504.0
SHIFT = 3


def check_headroom(audited: AuditedModel) -> Promise:
    """The largest score and the largest activation against the largest number of float16."""
    scores, activations = _Largest(), _Largest()

    def see(call: AttentionCall) -> None:
        dots = (call.q.float() @ call.k.float().mT).abs()
        bias = call.mask.attn_bias
        largest = dots.amax().item() if bias is None else max(dots.amax().item(), bias.float().abs().amax().item())
        scores.note(largest, call.site)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, out: Any) -> None:
            if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
                activations.note(out.abs().amax().item(), name)

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in audited.model.named_modules():
            if next(module.children(), None) is None:
                hooks.enter_context(module.register_forward_hook(OwnHook(note(name))))
        hooks.enter_context(intercept(audited.model, see))
        audited.run(audited.batch)
    largest = max(scores, activations, key=lambda x: x.value)
    share = LARGEST_HALF / largest.value if largest.value else float("inf")
    sentence = (
        f"The largest product q·k before scaling is {scores.value:.3g}, the largest output of a layer "
        f"{activations.value:.3g}: float16 holds {share:.2g} times as much."
        if share >= 1
        else f"{largest.value:.3g} does not fit into float16, whose largest number is {LARGEST_HALF:.0f}."
    )
    return Promise(HEADROOM, Standing.MEASURED, sentence, largest.value, None, largest.where)


class _Largest:
    def __init__(self) -> None:
        self.value, self.where = 0.0, ""

    def note(self, value: float, where: str) -> None:
        if value > self.value:
            self.value, self.where = value, where


def check_half(audited: AuditedModel) -> Iterator[Promise]:
    """A copy in half precision against the model."""
    for name, dtype in ((HALF, torch.float16), (BRAIN, torch.bfloat16)):
        if audited.dtype in (torch.float16, torch.bfloat16):
            yield Promise(name, Standing.NOT_APPLICABLE, f"The model is in {str(audited.dtype)[6:]} already.")
            continue
        try:
            out = _in_dtype(audited, dtype)
        except (HeadwiseError, RuntimeError, TypeError) as error:
            yield untried(name, NotTriedError(f"a copy does not run in {name.split()[0]} ({one_line(error)})"))
            continue
        distance, (b, i) = audited.worst(out, audited.reference)
        where = f"sequence {b}, position {i}"
        eps = torch.finfo(dtype).eps
        if distance == float("inf"):
            sentence = "The output overflows: it is NaN or infinite."
        else:
            sentence = f"The output changes by {distance / eps:.2g} times the precision of {name.split()[0]}."
        yield Promise(name, Standing.MEASURED, sentence, distance, eps, where)


def _in_dtype(audited: AuditedModel, dtype: torch.dtype) -> Tensor:
    model = nn.Module.to(copy.deepcopy(audited.model), dtype)  # not model.to: transformers refuses it for GGUF
    batch: Any = placed(audited.batch, None, dtype)
    with torch.no_grad():
        raw = model(*batch.values()) if audited.is_positional else model(**batch)
    return audited.by_sequence(main_output(raw, model))


def check_permutation(audited: AuditedModel) -> Promise:
    """A(permuted x) against permuted A(x)."""
    x = audited.positions()
    if audited.length < 2:
        raise NotTriedError("one token has no other order")
    order = torch.randperm(audited.length, generator=torch.Generator().manual_seed(audited.seed)).to(x.device)
    distance, _ = audited.worst(audited.run(audited.with_positions(x[:, order])), audited.reference[:, order])
    has = distance <= audited.threshold
    sentence = (
        "Permuted tokens give permuted outputs: no position is used." if has else "The order of the tokens matters."
    )
    return Promise(PERMUTATION, Standing.MEASURED, sentence, distance, audited.floor)


def check_translation(audited: AuditedModel) -> Promise:
    """The same tokens at positions that are all larger by `SHIFT`."""
    if not audited.takes("position_ids") or audited.has_decoder:
        raise DoesNotApplyError("it takes no position_ids")
    x = audited.positions()
    if audited.length < SHIFT + 2:
        raise NotTriedError(f"it needs {SHIFT + 2} tokens, but there are {audited.length}")
    start = torch.arange(audited.length - SHIFT, device=x.device).expand(len(x), -1)
    cut = audited.with_positions(x[:, : audited.length - SHIFT])
    first, moved = (audited.run({**cut, "position_ids": start + shift}) for shift in (0, SHIFT))
    distance, _ = audited.worst(moved, first)
    has = distance <= audited.threshold
    what = "nothing: only differences of positions matter" if has else "the output: positions are absolute"
    sentence = f"Positions larger by {SHIFT} change {what}."
    return Promise(TRANSLATION, Standing.MEASURED, sentence, distance, audited.floor)


def check_collapse(audited: AuditedModel) -> Promise:
    """The published bound on what attention layers alone do to the differences between tokens, on these weights."""
    try:
        audit = audit_weights(audited.model, seed=audited.seed)
    except UnsupportedError as error:
        reason = "the theorem is about softmax over all tokens in layers of one width, as in BERT; there is none here"
        raise DoesNotApplyError(reason) from error
    rows = {row["quantity"]: row["value"] for row in audit.rows}
    quantity = "log(residual / bound), last layer"
    shrinks = rows["bound shrinks with depth"] == "True"
    value = float(rows[quantity])
    sentence = (
        f"Attention alone, {audit.layers} layers: log(residual / bound) = {rows[quantity]}; the bound "
        f"{'shrinks' if shrinks else 'does not shrink'} with depth."
    )
    return Promise(COLLAPSE, Standing.VIOLATED if value > 0 else Standing.MEASURED, sentence, value)
