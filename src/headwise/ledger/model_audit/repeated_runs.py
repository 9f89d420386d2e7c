"""The same sequences run again must give the same: twice, in another batch, and with padding on either side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.ledger.model_audit.audited_model import AuditedModel, DoesNotApplyError, NotTriedError, untried
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.ledger.model_audit.sampled_inputs import pad_token

DETERMINISTIC, FINITE, BATCH = "deterministic", "finite", "batch = single"
RIGHT, LEFT = "right padding", "left padding"
PADDING = 5
"""Positions of padding."""

KEEP_MASKS = ("attention_mask",)
PAD_MASKS = ("src_key_padding_mask", "key_padding_mask")
"""Arguments that mark the real tokens, and those that mark padding."""


def check_finite(audited: AuditedModel) -> Promise:
    """No NaN and no infinity in the output."""
    bad = int((~audited.reference.isfinite()).sum())
    if bad == 0:
        return Promise(FINITE, Standing.KEPT, "No entry of the output is NaN or infinite.", 0.0)
    b, i = map(int, (~audited.reference.isfinite()).any(-1).nonzero()[0])
    sentence = f"{bad} of {audited.reference.numel()} entries of the output are NaN or infinite."
    return Promise(FINITE, Standing.VIOLATED, sentence, float(bad), None, f"sequence {b}, position {i}")


def check_deterministic(audited: AuditedModel) -> Promise:
    """Two runs in eval mode on the same input agree, whatever the random state."""
    with torch.no_grad():
        again = audited.output_of(audited.call(audited.batch, seed=audited.seed + 1))
    distance, (b, i) = audited.worst(again, audited.reference)
    return audited.verdict(
        DETERMINISTIC,
        distance,
        f"sequence {b}, position {i}",
        kept="Two runs in eval mode agree.",
        violated="Two runs in eval mode differ: something draws random numbers, such as dropout that was left on.",
    )


def check_batch_equals_single(audited: AuditedModel) -> Promise:
    """Each sequence alone gives what it gives beside others."""
    if audited.sequences < 2:
        raise NotTriedError("the batch has one sequence; give two or more")
    found = []
    for b in range(audited.sequences):
        distance, (_, i) = audited.worst(audited.run(audited.rows(b, b + 1)), audited.reference[b : b + 1])
        found.append((distance, b, i))
    distance, b, i = max(found)
    return audited.verdict(
        BATCH,
        distance,
        f"sequence {b}, position {i}",
        kept=f"Each of {audited.sequences} sequences alone gives what it gives in the batch.",
        violated="A sequence gives something else alone than beside others: sequences of a batch reach one another.",
    )


def padded_batch(audited: AuditedModel, side: str, *, positions: bool, other: bool = False) -> dict[str, Any]:
    """The batch with `PADDING` positions more on one side of the sequences of its encoder or only part.

    positions   also give position_ids, which count the real tokens, as generate() does
    other       fill with other tokens than padding, which must not matter as they are masked
    """
    name = "input_ids" if "input_ids" in audited.batch else audited.tokens
    if name is None or (audited.has_decoder and name == audited.tokens):
        raise DoesNotApplyError("it takes no tokens that could be padded")
    mask = next((x for x in (*KEEP_MASKS, *PAD_MASKS) if audited.takes(x)), None)
    if mask is None:
        raise NotTriedError("it takes no attention_mask, so nothing can say what is padding")
    x = audited.batch[name] if audited.is_text else audited.positions()
    is_ids = x.dim() == 2 and not other
    filler = x.new_full((len(x), PADDING), pad_token(audited.model)) if is_ids else x[:, other : other + PADDING]
    real, pads = x.new_ones(x.shape[:2], dtype=torch.bool), x.new_zeros((len(x), PADDING), dtype=torch.bool)
    order = slice(None, None, 1 if side == RIGHT else -1)
    keep = torch.cat([real, pads][order], 1)
    longer = torch.cat([x, filler][order], 1)
    changed = {**audited.batch, name: longer} if audited.is_text else audited.with_positions(longer)
    for key, value in audited.batch.items():
        beside = isinstance(value, Tensor) and value.shape[:2] == x.shape[:2]
        if beside and key not in (name, mask, "decoder_input_ids"):
            changed[key] = torch.cat([value, value[:, :PADDING]][order], 1)
    changed[mask] = keep.long() if mask in KEEP_MASKS else ~keep
    if positions:
        changed["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)
    return changed


def check_padding(audited: AuditedModel) -> Iterator[Promise]:
    """Real tokens give the same with and without padding."""
    for side in (RIGHT, LEFT):
        yield padding_on(audited, side)


def padding_on(audited: AuditedModel, side: str) -> Promise:
    """The verdict on one side."""
    try:
        return _padding_on(audited, side)
    except HeadwiseError as error:
        return untried(side, error)


def _padding_on(audited: AuditedModel, side: str) -> Promise:
    forms = [False, True] if audited.takes("position_ids") and not audited.has_decoder else [False]

    def run(positions: bool, other: bool = False) -> Tensor:
        out = audited.run(padded_batch(audited, side, positions=positions, other=other))
        if audited.has_decoder:
            return out
        return out[:, : audited.length] if side == RIGHT else out[:, PADDING:]

    found = [(audited.worst(run(positions), audited.reference), positions) for positions in forms]
    (distance, (b, i)), positions = found[0] if found[0][0][0] <= audited.threshold else min(found)
    what, where = f"{PADDING} padding tokens on the {side.split()[0]}", f"sequence {b}, position {i}"
    if distance <= audited.threshold:
        kept = f"{what} change nothing"
        if positions:
            kept += (
                " if position_ids count the real tokens, as generate() gives them; without them the output changes by "
                f"{found[0][0][0]:.2g}"
            )
        return audited.verdict(side, distance, where, kept=f"{kept}.", violated="")
    is_promised = True
    if audited.distance(run(positions, other=True), run(positions)) > audited.threshold:
        violated = (
            "What stands in the padding changes the output at real tokens: it is attended to though it is masked."
        )
    elif side == LEFT and (len(forms) == 1 or not audited.causal):
        is_promised = False
        why = "and the model takes no position_ids" if len(forms) == 1 else "also if position_ids count the real ones"
        violated = (
            f"Padding on the left moves real tokens, {why}: pad it on the right.  The padding is not attended to."
        )
    else:
        violated = f"{what} change the output at real tokens, whatever stands in them: they move something."
    return audited.verdict(side, distance, where, kept="", violated=violated, is_promised=is_promised)
