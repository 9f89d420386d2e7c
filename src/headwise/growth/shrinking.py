"""`shrink`: fewer query/key dimensions for each attention module of a model, and what that changes.

Every layer keeps one width for all its heads, so that its cache is one tensor; how many dimensions each layer keeps is
chosen by the drift of the model's output when it alone is narrowed, on texts that are not those it is measured on.
Which dimensions: `site_statistics`.  The module's own weights stay: A is applied to what they compute, before keys are
cached (models/widths).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.growth.site_statistics import SiteStatistics
from headwise.models.fingerprint import check_weights
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.run import Batch, as_it_was, run_model
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.resized_models import resized
from headwise.models.widths.rotary import rotated_pairs
from headwise.models.widths.widened_attention import NAME, WidenedCall
from headwise.progress import Progress, reported
from headwise.shapes import shown

SHORTEST = 4
"""Tokens that the first batch needs."""

JUDGES = 1
"""Batches on which the drift of each layer at each level is measured, to choose among them."""


@final
@dataclass(frozen=True)
class Shrinking:
    """What `shrink` did: query/key widths of each attention module, and the drift of the output on unseen batches.

    measure       "nats per token" (mean KL divergence of the next token's distribution) or "1 - cosine" of mean states
    drift         on the batches that nothing was chosen by; drifts are those of each of them
    key_numbers   numbers that a cache holds for the keys of one token, before and after
    """

    widths: dict[str, tuple[int, int]]
    measure: str
    drifts: tuple[float, ...]
    key_numbers: tuple[int, int]
    value_numbers: int

    @property
    def drift(self) -> float:
        return sum(self.drifts) / len(self.drifts)

    @property
    def key_cache_saved(self) -> float:
        """The share of the key cache that is saved."""
        before, after = self.key_numbers
        return 1 - after / before

    @property
    def cache_saved(self) -> float:
        """The share of the whole cache, of keys and values, that is saved."""
        before, after = self.key_numbers
        return (before - after) / (before + self.value_numbers)

    def to_dict(self) -> dict[str, Any]:
        shares = {"drift": self.drift, "key_cache_saved": self.key_cache_saved, "cache_saved": self.cache_saved}
        return {**vars(self), "widths": {name: list(w) for name, w in self.widths.items()}, **shares}


def shrink(
    model: nn.Module, batches: Sequence[Batch], *, keep: float = 0.5, progress: Progress | bool | None = None
) -> tuple[nn.Module, Shrinking]:
    """A copy of a transformers model whose heads keep the share `keep` of their query/key dimensions, and a report.

    Half of the batches choose the dimensions, the others measure the drift.
    """
    if not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise InputError(f"shrink: keep must be above 0 and at most 1, but is {shown(keep)}")
    if not isinstance(batches, Sequence):
        raise InputError(f"shrink: batches must be a list of batches, but is {shown(batches)}")
    if is_pretrained(model):
        check_weights(model)
    if len(batches) < 2:
        raise InputError(f"shrink: half of the batches choose and half measure, but there are {len(batches)}; give 2")
    chosen_by, measured_by = batches[0::2], batches[1::2]
    new = narrow_copy(model, chosen_by[0])
    statistics = gather(new, chosen_by)
    heads = {site: x.key_heads for site, x in statistics.items()}
    _check_keep({site: [*x.levels(), x.width] for site, x in statistics.items()}, keep, heads)
    curves = drift_curves(new, statistics, chosen_by[:JUDGES], progress)
    widths = allocate(curves, keep, heads)
    return new, narrowed_copy_report(model, new, statistics, widths, measured_by)


def drift_curves(
    new: nn.Module,
    statistics: Mapping[str, SiteStatistics],
    judges: Sequence[Batch],
    progress: Progress | bool | None = None,
) -> dict[str, dict[int, float]]:
    """{module: {width: drift of the output when it alone has this width}}"""
    levels = {site: x.levels() for site, x in statistics.items()}
    steps, total = 0, sum(map(len, levels.values()))
    reference = outputs(new, judges)
    curves: dict[str, dict[int, float]] = {}
    with reported(progress) as report:
        for site, x in statistics.items():
            curves[site] = {x.width: 0.0}
            for width in levels[site]:
                if width < x.width:
                    with narrowed_to(new, statistics, {site: width}):
                        curves[site][width] = mean_drift(reference, outputs(new, judges))
                steps += 1
                report("narrowing layers", steps, total)
    return curves


def narrow_copy(model: nn.Module, batch: Batch) -> nn.Module:
    """A copy of the model whose attention modules have HeadDimensions; the original is not touched."""
    if not is_pretrained(model):
        raise UnsupportedError(
            f"shrink: {type(model).__name__} is no model of transformers; the heads of a MultiHead are narrowed by "
            "Grower.shrink"
        )
    new = copy.deepcopy(model)
    probe = dict(batch) if isinstance(batch, Mapping) else None
    modules = resized(new, probe)
    if not modules:
        raise UnsupportedError(f"shrink: {type(model).__name__} never called transformers' attention interface")
    return new.eval()


def narrowed_copy_report(
    model: nn.Module,
    new: nn.Module,
    statistics: Mapping[str, SiteStatistics],
    widths: Mapping[str, int],
    batches: Sequence[Batch],
) -> Shrinking:
    """Narrow `new` for good, and compare it with `model`."""
    before = outputs(model, batches)
    for site, width in widths.items():
        if width < statistics[site].width:
            dimensions_of(new, site).keep_(*statistics[site].maps(width))
    after = outputs(new, batches)
    heads = {site: x.key_heads for site, x in statistics.items()}
    return Shrinking(
        {site: (statistics[site].width, width) for site, width in widths.items()},
        "nats per token" if before[0].logits else "1 - cosine",
        tuple(drift(a, b) for a, b in zip(before, after, strict=True)),
        (sum(heads[s] * statistics[s].width for s in widths), sum(heads[s] * widths[s] for s in widths)),
        sum(heads[s] * statistics[s].value_width for s in widths),
    )


def dimensions_of(model: nn.Module, site: str) -> HeadDimensions:
    dimensions = getattr(model.get_submodule(site), NAME)
    assert isinstance(dimensions, HeadDimensions)
    return dimensions


@contextmanager
def narrowed_to(
    model: nn.Module, statistics: Mapping[str, SiteStatistics], widths: Mapping[str, int]
) -> Iterator[None]:
    """Some attention modules at other widths inside the context."""
    try:
        for site, width in widths.items():
            dimensions_of(model, site).keep_(*statistics[site].maps(width))
        yield
    finally:
        for site in widths:
            dimensions_of(model, site).keep_all_()


@torch.no_grad()
def gather(model: nn.Module, batches: Sequence[Batch]) -> dict[str, SiteStatistics]:
    """The statistics of every attention module with HeadDimensions."""
    sites = [name for name, module in model.named_modules() if getattr(module, NAME, None) is not None]
    calls: dict[str, list[WidenedCall]] = {site: [] for site in sites}
    statistics: dict[str, SiteStatistics] = {}
    handles = []
    inputs: dict[str, tuple[tuple, dict]] = {}
    try:
        for site in sites:
            dimensions_of(model, site).observer = lambda call, out, site=site: calls[site].append(call)  # type: ignore[assignment]
            module = model.get_submodule(site)
            note = lambda module, args, kwargs, site=site: _first(inputs, site, (args, kwargs))  # noqa: E731
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True, prepend=True))
        with as_it_was(model):
            for batch in batches:
                inputs.clear()
                run_model(model, batch)
                for site in sites:
                    seen, calls[site] = calls[site], []
                    if seen and site not in statistics:
                        if seen[0].q.shape[-2] < SHORTEST:
                            raise InputError(
                                f"shrink: {site} is given {seen[0].q.shape[-2]} tokens, which show neither what its "
                                f"heads read nor how positions turn them; give at least {SHORTEST}"
                            )
                        pairs = _pairs(model, site, seen[0], inputs[site], calls[site])
                        statistics[site] = SiteStatistics(seen[0], pairs)
                    for call in seen:
                        statistics[site].add(call)
    finally:
        for handle in handles:
            handle.remove()
        for site in sites:
            del dimensions_of(model, site).observer
    return statistics


def _first(inputs: dict[str, tuple[tuple, dict]], site: str, given: tuple[tuple, dict]) -> None:
    """Keep the inputs of the first call of a module, which may be called several times (ALBERT)."""
    inputs.setdefault(site, given)


def _pairs(
    model: nn.Module, site: str, call: WidenedCall, given: tuple[tuple, dict], calls: list[WidenedCall]
) -> list[tuple[int, int]]:
    """Call the module again with one vector at every position, and see which pairs of dimensions turn."""

    def constant(value: Any) -> Any:
        if value is call.x or value is call.context:
            return value[:1, :1].expand_as(value)
        return None if hasattr(value, "get_seq_length") else value

    args, kwargs = given
    model.get_submodule(site)(*map(constant, args), **{name: constant(value) for name, value in kwargs.items()})
    again = calls.pop()
    return rotated_pairs(site, again.q[:1], again.k[:1])


@final
@dataclass(frozen=True, eq=False)
class Output:
    """log-probabilities of the next token (b, n, v), or mean states (b, d) of each sequence."""

    values: Tensor
    logits: bool


@torch.no_grad()
def outputs(model: nn.Module, batches: Sequence[Batch]) -> list[Output]:
    """Of every batch without its padding: log-probabilities of the next tokens, or the mean state of each sequence."""
    found = []
    with as_it_was(model):
        for batch in batches:
            out = run_model(model, batch)
            logits = getattr(out, "logits", None)
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            if isinstance(logits, Tensor) and logits.dim() == 3:
                real = logits if mask is None or mask.shape != logits.shape[:2] else logits[mask.bool()]
                found.append(Output(real.float().log_softmax(-1), True))
                continue
            states = out[0] if not isinstance(out, Tensor) else out
            weights = torch.ones_like(states[..., :1]) if mask is None else mask.unsqueeze(-1).to(states)
            found.append(Output((states * weights).sum(1) / weights.sum(1).clamp(min=1), False))
    return found


def drift(before: Output, after: Output) -> float:
    """Mean KL divergence of the next token's distribution in nats, or mean 1 - cosine."""
    a, b = before.values.double(), after.values.double()
    if before.logits:
        return max(0.0, float((a.exp() * (a - b)).sum(-1).mean()))  # rounding may make it negative
    return max(0.0, float((1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).mean()))


def mean_drift(before: Sequence[Output], after: Sequence[Output]) -> float:
    return sum(map(drift, before, after)) / len(before)


def allocate(curves: Mapping[str, Mapping[int, float]], keep: float, heads: Mapping[str, int]) -> dict[str, int]:
    """A width for each module with least sum of drifts, and at most the share `keep` of all key numbers.

    Narrows the module that loses least per number saved, along the convex hull of its curve.
    """
    _check_keep(curves, keep, heads)
    widths = {site: max(curve) for site, curve in curves.items()}
    allowed = keep * sum(heads[site] * width for site, width in widths.items())
    queue: list[tuple[float, str, int]] = []

    def push(site: str) -> None:
        here = widths[site]
        lower = [width for width in curves[site] if width < here]
        if lower:
            rate = lambda w: (curves[site][w] - curves[site][here]) / (heads[site] * (here - w))  # noqa: E731
            width = min(lower, key=rate)
            heapq.heappush(queue, (rate(width), site, width))

    for site in curves:
        push(site)
    while sum(heads[site] * width for site, width in widths.items()) > allowed:
        _, site, width = heapq.heappop(queue)
        widths[site] = width
        push(site)
    return widths


def _check_keep(levels: Mapping[str, Collection[int]], keep: float, heads: Mapping[str, int]) -> None:
    """Raise InputError if the narrowest of the widths of each module are more than the share `keep`."""
    narrowest, widest = (sum(heads[site] * f(x) for site, x in levels.items()) for f in (min, max))
    if keep * widest < narrowest:
        raise InputError(
            f"shrink: keep = {keep} is less than the narrowest widths that are tried, {narrowest} of {widest} "
            f"query/key dimensions; keep at least {math.ceil(1000 * narrowest / widest) / 1000:g}"
        )
