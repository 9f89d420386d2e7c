"""q' = q A_q, k' = k A_k with r < k dimensions whose products are nearest to q.k, where attention depends on them.

Scores of a row that move by ds change its attention by Var_{j ~ P_i}(ds_j), twice the Kullback-Leibler divergence to
second order.  For the heads of a group, which share A_k, the solver of growth (solve.py) minimises

    sum_h E_i Var_{j ~ P_i}( q_i^T (1 - A_q A_k^T) k_j )  ~  sum_h || C_q^(1/2) (1 - A_q A_k^T) C_k^(1/2) ||^2,

C_q = E q q^T and C_k = E_i Cov_{j ~ P_i}(k_j).  With rotary positions only whole pairs of dimensions may go, with their
frequencies, so that scores still depend on distances alone: of the pairs' parts s_c of the scores, the covariance
K = E_i Cov_{j ~ P_i}(s_c, s_c') is all that is needed.  Pairs are dropped one by one, each time the one that is missed
least, and those kept are scaled by w with least (1 - w)^T K (1 - w), w = 0 for those that go.

Every layer keeps one width for all its heads, so that its cache is one tensor; how many dimensions each layer keeps is
chosen by the drift of the model's output when it alone is narrowed, on texts that are not those it is measured on.
The module's own weights stay: A is applied to what they compute, before keys are cached (models/widths).
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
from headwise.growth.metric import Root, root
from headwise.growth.normal_equations import take_rows, visible_rows
from headwise.growth.solve import truncate
from headwise.models.fingerprint import check_weights
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.run import Batch, as_it_was, run_model
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.resized_models import resized
from headwise.models.widths.rotary import rotated_pairs
from headwise.models.widths.widened_attention import NAME, WidenedCall
from headwise.progress import Progress, reported
from headwise.shapes import shown

ROWS = 64
"""Query rows of a sequence, drawn at random, behind the statistics."""

SHORTEST = 4
"""Tokens that the first batch needs."""

LEVELS = (1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of its width that a layer may keep."""

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
            dimensions_of(model, site).kept = None


@final
class SiteStatistics:
    """C_q (h, k, k) and C_k (h_kv, k, k), or with rotary positions K (h_kv, pairs, pairs), of one attention module."""

    def __init__(self, call: WidenedCall, pairs: Sequence[tuple[int, int]]) -> None:
        self.heads, self.key_heads, self.width = call.q.shape[1], call.k.shape[1], call.q.shape[-1]
        self.value_width = call.v.shape[-1]
        self.pairs = list(pairs)
        sums = {"dtype": torch.float64, "device": call.q.device}
        self.c_q = torch.zeros(self.heads, self.width, self.width, **sums)
        self.c_k = torch.zeros(self.key_heads, self.width, self.width, **sums)
        self.between = torch.zeros(self.key_heads, len(self.pairs), len(self.pairs), **sums)
        self._draws = torch.Generator().manual_seed(0)

    @property
    def group(self) -> int:
        return self.heads // self.key_heads

    @property
    def fixed(self) -> list[int]:
        """Dimensions of a module with rotary positions that do not turn; they are kept."""
        turning = {i for pair in self.pairs for i in pair}
        return [i for i in range(self.width) if i not in turning] if self.pairs else []

    def levels(self) -> list[int]:
        """The widths to choose from, at least one pair where pairs turn."""
        steps = [int(self.width * share) for share in LEVELS]
        if self.pairs:
            least = len(self.fixed) + 2
            steps = [len(self.fixed) + 2 * ((step - len(self.fixed)) // 2) for step in steps if step >= least]
        return sorted({step for step in steps if step > 0})

    @torch.no_grad()
    def add(self, call: WidenedCall) -> None:
        """Add the sampled rows of one call."""
        b, _, m, _ = call.q.shape
        rows = torch.randperm(m, generator=self._draws)[:ROWS].sort().values.to(call.q.device)
        q, k = call.q.index_select(2, rows).float(), call.k.float()
        shared = k.repeat_interleave(self.group, 1)
        scores = call.scaling * q @ shared.mT
        if call.mask.attn_bias is not None:
            scores = scores + take_rows(call.mask.attn_bias, rows).float()
        visible = visible_rows(call.mask, rows)
        scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
        p = scores.softmax(-1).nan_to_num(0)
        for i in range(b):
            for h in range(self.heads):
                self._add_head(h, q[i, h].double(), k[i, h // self.group].double(), p[i, h].double())

    def _add_head(self, h: int, q: Tensor, k: Tensor, p: Tensor) -> None:
        g = h // self.group
        if self.pairs:
            first, second = (list(side) for side in zip(*self.pairs, strict=True))
            parts = q[:, None, first] * k[:, first] + q[:, None, second] * k[:, second]  # (m, n, pairs)
            mean = torch.einsum("mn,mnc->mc", p, parts)
            weighted = (parts - mean[:, None]) * p.sqrt().unsqueeze(-1)
            weighted = weighted.flatten(0, 1)
            self.between[g] += weighted.mT @ weighted
            return
        self.c_q[h] += q.mT @ q
        mean = p @ k
        self.c_k[g] += (k * p.sum(0)[:, None]).mT @ k - mean.mT @ mean

    def maps(self, width: int) -> tuple[Tensor, Tensor]:
        """A_q (h, k, width) and A_k (h_kv, k, width)."""
        found = [self._pair_map(g, width) if self.pairs else self._map(g, width) for g in range(self.key_heads)]
        return torch.cat([q for q, _ in found]), torch.stack([k for _, k in found])

    def _map(self, g: int, width: int) -> tuple[Tensor, Tensor]:
        own = self.c_q[g * self.group : (g + 1) * self.group]
        return subspace(own, self.c_k[g], width)

    def _pair_map(self, g: int, width: int) -> tuple[Tensor, Tensor]:
        kept, scale = best_pairs(self.between[g], (width - len(self.fixed)) // 2)
        columns = [*self.fixed, *(i for c in kept for i in self.pairs[c])]
        factors = [1.0] * len(self.fixed) + [float(w) for w in scale for _ in range(2)]
        key_map = torch.zeros(self.width, width, dtype=torch.float64, device=self.between.device)
        key_map[columns, list(range(width))] = 1
        query_map = key_map * torch.tensor(factors, dtype=torch.float64, device=key_map.device)
        return query_map.expand(self.group, -1, -1), key_map


def subspace(c_q: Tensor, c_k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A_q (g, k, r) and A_k (k, r) with least sum_h ||C_q^(1/2) (1 - A_q A_k^T) C_k^(1/2)||, C_q (g, k, k)."""
    roots = [root(c, 1e-9) for c in c_q]
    q = Root(torch.stack([x.root for x in roots]), torch.stack([x.inverse for x in roots]), roots[0].rank)
    one = torch.eye(len(c_k), dtype=c_k.dtype, device=c_k.device).expand(len(c_q), -1, -1)
    factors = truncate(one, width, q, root(c_k, 1e-9))
    return factors.wq, factors.wk


def best_pairs(between: Tensor, count: int) -> tuple[list[int], Tensor]:
    """`count` pairs to keep, in order, and the factors w of their scores with least (1 - w)^T K (1 - w).

    Backward elimination: the pair without which least squares of the whole score on the others gets worse least,
    by w_c^2 / (K^-1)_cc.
    """
    size = len(between)
    ridge = 1e-9 * between.diagonal().mean().clamp(min=torch.finfo(between.dtype).tiny)
    inverse = torch.linalg.inv(between + ridge * torch.eye(size, dtype=between.dtype, device=between.device))
    kept, w = list(range(size)), inverse @ between.sum(1)
    while len(kept) > count:
        c = int((w.square() / inverse.diagonal()).argmin())
        column, corner = inverse[:, c].clone(), inverse[c, c].clone()
        w = w - column * (w[c] / corner)
        inverse = inverse - torch.outer(column, column) / corner
        rest = [i for i in range(len(kept)) if i != c]
        kept, w, inverse = [kept[i] for i in rest], w[rest], inverse[rest][:, rest]
    return kept, w


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
