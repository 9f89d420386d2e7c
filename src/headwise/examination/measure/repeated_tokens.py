"""Scores of induction and duplicate-token heads on random tokens that are repeated twice.

    t_1 … t_L t_1 … t_L        L different tokens of the text in random order
    score = mean of sum_j P_ij over the queries of the second half, j the keys of the pattern (`token_patterns`)

This is the usual test for induction heads (Olsson et al. 2022): nothing but the repetition can tell where to attend.
On real text most of them rest on a sink, since few tokens repeat in the same order: a head of SmolLM2-135M with a score
of 0.59 has an induction weight of 0.00 on Moby-Dick.  It costs one forward pass over at most 2 LONGEST tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.examination.measure.token_patterns import TokenPlaces, token_ids, token_weights
from headwise.models.intercept import AttentionCall, intercept
from headwise.models.run import Batch, run_model
from headwise.operators._kernels.scores import Scores, attend_with_lse

LONGEST = 64
"""Tokens that are repeated, at most."""

SHORTEST = 8
"""Fewer different tokens say nothing: a head that averages would score above 6 %."""

_OTHER_ARGUMENTS = {"attention_mask", "token_type_ids"}
"""May be left out together with the text that they belong to."""


@dataclass(frozen=True, eq=False)
class RepeatedTokenScores:
    """Score of each pattern for the heads of one attention call, (h,) each.  Input of measures."""

    score: Mapping[str, Tensor]


def repeated_token_scores(model: nn.Module, batch: Batch) -> dict[str, RepeatedTokenScores]:
    """site -> scores, for self-attention over tokens; empty if the batch has other inputs than tokens."""
    probe = _repeated(batch)
    if probe is None:
        return {}
    scores: dict[str, RepeatedTokenScores] = {}
    ids = next(iter(probe.values())) if isinstance(probe, Mapping) else probe
    assert isinstance(ids, Tensor)
    places = TokenPlaces.of(ids[0])

    def see(call: AttentionCall) -> None:
        if call.kind == "self" and call.q.shape[0] == 1 and call.q.shape[-2] == call.k.shape[-2] == ids.shape[1]:
            q, k, v = (x[0].float() for x in (call.q, call.k, call.v))
            part = Scores(q, k, call.scale, call.mask.index(0))
            _, lse = attend_with_lse(part, v[..., :1])
            scores[call.site] = RepeatedTokenScores(token_weights(part, lse, places, second_half=True).mass)

    try:
        with torch.no_grad(), intercept(model, see):
            run_model(model, probe)
    except HeadwiseError:  # a model that takes texts of one length only
        return {}
    return scores


def _repeated(batch: Batch) -> Batch | None:
    """One text of random tokens, twice, in the form of `batch`."""
    ids = token_ids(batch)
    row = ids.get("input_ids")
    if row is None or row.dim() != 2:
        return None
    different = row[0].unique()
    length = min(LONGEST, len(different), row.shape[1] // 2)
    if length < SHORTEST:
        return None
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0))[:length]
    half = different[order.to(different.device)]
    twice = torch.cat([half, half]).unsqueeze(0)
    if not isinstance(batch, Mapping):
        return twice
    return dict.fromkeys(ids, twice) if set(batch) <= {*ids, *_OTHER_ARGUMENTS} else None
