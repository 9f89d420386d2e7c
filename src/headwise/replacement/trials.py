"""Two models on the same texts at planned lengths: drift, seconds, and bytes of the cache.

loss     of language models: the mean change of a token's loss, and its 95 % interval over tokens
cosine   of others: 1 - cos(mean of the final states, the same before), and its 95 % interval over texts
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models.run import as_it_was

AT_ONCE = 1 << 25
"""Logits that are computed at once."""

SCALED = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings of families whose logits are more than a product with the output embeddings."""


@final
@dataclass(frozen=True)
class Trial:
    """Both models on texts of one kind and length.

    drift, interval   change of the loss or of the states, and half of its 95 % interval (NaN if there is one text)
    losses            per token, before and after; None unless the model predicts tokens
    seconds           of one text, before and after: the forward pass, for decoders with a cache, without the logits
    cache_bytes       held after a text, before and after; None for models without a cache
    """

    kind: str
    length: int
    measure: str
    drift: float
    interval: float
    losses: tuple[float, float] | None
    seconds: tuple[float, float]
    cache_bytes: tuple[int, int] | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def trial(old: nn.Module, new: nn.Module, texts: Sequence[Mapping[str, Any]], kind: str) -> Trial:
    """`old` and `new` on texts of one length, in turns."""
    changes: list[Tensor] = []  # one number for each token, or for each text
    losses: list[Tensor] = []
    seconds: list[tuple[float, ...]] = []
    sizes: list[tuple[int, ...]] = []
    with as_it_was(old), as_it_was(new), torch.no_grad():
        for batch in texts:
            runs = [_run(model, batch) for model in (old, new)]
            answers = [_answer(model, batch, run.states) for model, run in zip((old, new), runs, strict=True)]
            if answers[0].dim() == 1:  # losses
                changes.append(answers[1] - answers[0])
                losses.append(torch.stack([x.mean() for x in answers]))
            else:
                changes.append(1 - F.cosine_similarity(*answers, dim=-1))
            seconds.append(tuple(run.seconds for run in runs))
            sizes.append(tuple(run.cache_bytes for run in runs if run.cache_bytes is not None))
    every = torch.cat(changes).double()
    spread = every.std().item() if len(every) > 1 else math.nan
    means = torch.stack(losses).mean(0).tolist() if losses else None
    middle = sorted(seconds, key=sum)[len(seconds) // 2]
    n = next(iter(texts[0].values())).shape[-1]
    return Trial(
        kind,
        int(n),
        "loss" if losses else "cosine",
        abs(every.mean().item()),
        1.96 * spread / math.sqrt(len(every)),
        None if means is None else (means[0], means[1]),
        (middle[0], middle[1]),
        (sizes[0][0], sizes[0][1]) if len(sizes[0]) == 2 else None,
    )


@dataclass(frozen=True, eq=False)
class _Run:
    states: Tensor
    seconds: float
    cache_bytes: int | None


def _run(model: Any, batch: Mapping[str, Any]) -> _Run:
    """The final states (b, n, width)."""
    body, cache, options = model, None, {}
    if _predicts(model):
        body = model.base_model
        cache = options["past_key_values"] = _cache(model)
    start = time.perf_counter()
    output = body(**batch, **options)
    seconds = time.perf_counter() - start
    states = next(x for x in output.values() if isinstance(x, Tensor) and x.dim() == 3)
    if cache is None:
        return _Run(states, seconds, None)
    from headwise.replacement.install.head_cache import cache_bytes

    return _Run(states, seconds, cache_bytes(cache))


def _predicts(model: Any) -> bool:
    """Whether it is a decoder whose next tokens can be scored."""
    config = getattr(model, "config", None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    causal = hasattr(model, "generate") and not getattr(config, "is_encoder_decoder", False)
    return causal and head is not None and not any(getattr(config, name, None) for name in SCALED)


def _cache(model: Any) -> Any:
    from transformers import DynamicCache

    if getattr(model.config, "headwise", None) is None:
        return DynamicCache(config=model.config)
    from headwise.replacement.install.head_cache import HeadCache

    return HeadCache(model)


def _answer(model: Any, batch: Mapping[str, Any], states: Tensor) -> Tensor:
    """The loss of every token after the first, (tokens,), or the mean state of every text, (b, width)."""
    if not _predicts(model):
        mask = batch.get("attention_mask")
        weights = torch.ones_like(states[..., :1]) if mask is None else mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)
    head, targets = model.get_output_embeddings(), batch["input_ids"][:, 1:].flatten()
    rows = states[:, :-1].flatten(0, 1)
    size = max(1, AT_ONCE // head.weight.shape[0])
    return torch.cat(
        [
            F.cross_entropy(head(x).float(), y, reduction="none")
            for x, y in zip(rows.split(size), targets.split(size), strict=True)
        ]
    )


def warnings(trials: Iterable[Trial], tolerance: float) -> list[str]:
    """A line for each trial whose drift is above the tolerance, and for each that was slower."""
    found = []
    for each in trials:
        if each.drift > tolerance:
            unsure = ", within its interval" if each.drift - each.interval <= tolerance else ""
            found.append(f"{each.kind} at {each.length}: drift {each.drift:.4f} > tolerance {tolerance:g}{unsure}")
        if each.seconds[1] > 1.05 * each.seconds[0]:
            before, after = each.seconds
            found.append(f"{each.kind} at {each.length}: slower than before, {after:.2f} s instead of {before:.2f} s")
    return found
