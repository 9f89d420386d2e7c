"""What candidates and plans cost: counted multiply-adds, bytes of cache, or seconds measured on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.operators._kernels import native
from headwise.replacement.install.kept_keys import LayerPast, NewKeys
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.kinds import Choice
from headwise.replacement.planning.capture import AttentionSite
from headwise.replacement.plans import Plan
from headwise.replacement.standard_kinds import SOFTMAX

OBJECTIVES = ("seconds", "prefill", "decode", "memory", "multiply-adds")
"""seconds: attention of one sequence, in decoders the mean of the shares of prefill and decode; prefill: seconds for
all queries at once; decode: seconds for one new token, with a HeadCache; memory: keys that are kept in the cache."""

REPEATS, SLOW = 7, 0.3
"""Most calls that are timed, and the seconds after which three are enough."""

OTHER_ROWS, OTHER_WEIGHTS = 128, 1 << 22
"""Of a product between two calls, as of the linear maps of a model (measured: at 128 tokens twelve heads of 32 take 1.1
times the time of the original attention after such maps, and .7 in a loop, where all they read stays in the caches)."""


def relative_costs(
    sites: Mapping[str, AttentionSite], choices: Sequence[Choice], length: int, objective: str
) -> dict[tuple[str, Choice], float]:
    """Cost of one key-value head by (site, choice), as a share of exact attention of all heads."""
    if objective in ("seconds", "prefill", "decode") and native.LIBRARY.mode == "auto":
        with native.switched("build"):  # the seconds of later runs, which find the kernels
            native.usable(torch.zeros(1))
    shares: dict[tuple[str, Choice], float] = {}
    parts = ["prefill", "decode"] if objective == "seconds" and any(s.causal for s in sites.values()) else [objective]
    for part in parts:
        costs = {
            (name, choice): _cost(choice, site, length, part) for name, site in sites.items() for choice in choices
        }
        total = sum(site.key_value_heads * costs[name, SOFTMAX] for name, site in sites.items())
        for key, cost in costs.items():
            shares[key] = shares.get(key, 0.0) + cost / total / len(parts)
    return shares


def _cost(choice: Choice, site: AttentionSite, length: int, objective: str) -> float:
    shared = site.heads // site.key_value_heads
    if objective == "multiply-adds":
        return shared * choice.cost(length, site.width, site.causal).multiply_adds
    if objective == "memory":
        return 2 * site.width * kept_keys(choice, length)
    size = site.heads, site.key_value_heads, site.width, length
    if objective == "decode":  # kinds that cannot use a cache gain nothing from one
        return _seconds_of_token(choice if choice.definition.cached else SOFTMAX, *size) / site.key_value_heads
    return _seconds_alone(choice, *size, site.causal) / site.key_value_heads


def kept_keys(choice: Choice, n: int) -> int:
    """Keys of n that a key-value head must keep for later queries."""
    return min(n, choice.options["width"] + choice.options["leading"]) if choice.kind == "window" else n


@cache  # sites of one model are alike
def _seconds_alone(choice: Choice, heads: int, groups: int, width: int, length: int, causal: bool) -> float:
    return _seconds([MixedHeads([choice] * heads, width, length)], heads, groups, width, length, causal)[0]


@cache  # sites of one model are alike
def _seconds_of_token(choice: Choice, heads: int, groups: int, width: int, length: int) -> float:
    return _token_seconds(MixedHeads([choice] * heads, width, 2 * length + REPEATS), groups, length)[-1]


def _token_seconds(heads: MixedHeads, groups: int, length: int) -> list[float]:
    """Median time of a new query after `length` keys: exact, with all keys copied for every token as by transformers,
    and with a HeadCache."""
    generator, width = torch.Generator().manual_seed(0), heads.width
    past, scale = LayerPast(heads), width**-0.5
    keys, values = torch.randn(2, 1, groups, length, width, generator=generator)
    q, k, v = (torch.randn(1, h, 1, width, generator=generator) for h in (len(heads.choices), groups, groups))

    other = _other_work(1, len(heads.choices) * width)

    def original(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True)

    times: list[list[float]] = [[], []]
    with torch.no_grad(), heads.at_any_length():
        past.fill(keys, values, scale)
        for n in range(length, length + REPEATS + 1):
            other()
            start = time.perf_counter()
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            original(keys, values)
            times[0].append(time.perf_counter() - start)
            other()
            start = time.perf_counter()
            past.attend(q, k, v, NewKeys(n, n + 1, scale), original)
            times[1].append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in times]


def time_plan(plan: Plan, objective: str = "seconds") -> dict[str, Any]:
    """Seconds of attention in the whole model, as it was and as planned, by length; and keys in its cache.

    seconds      of all queries at once, by length
    token        of a new query after so many keys, in decoders whose heads can use a cache
    exact_below  for each site, the least of the lengths from which on the planned heads were never slower in what the
                 objective is about; for "memory" an eighth of the length at most, so that no cache gets larger by it
    """
    lengths = [n for n in (1 << i for i in range(5, 25)) if n < plan.length] + [plan.length]
    rows: dict[str, dict[int, list[float]]] = {part: {n: [0.0, 0.0] for n in lengths} for part in ("seconds", "token")}
    below: dict[str, int] = {}
    measured: dict[tuple, dict[str, dict[int, list[float]]]] = {}  # sites of one model are alike
    decodes = all(
        plan.model["sites"][site]["causal"] and choice.definition.cached
        for site, choices in plan.sites.items()
        for choice in choices
    )
    for site, choices in plan.sites.items():
        facts = plan.model["sites"][site]
        heads = plan.mixed_heads(site)
        groups, key = facts.get("key_value_heads", len(choices)), (tuple(choices), facts["width"], facts["causal"])
        if key not in measured:
            unchanged = heads.replaced is None and not native.usable(torch.zeros(1))
            versions = [_original] if unchanged else [_original, heads]
            size = len(choices), groups, facts["width"]
            measured[key] = {"seconds": {n: _seconds(versions, *size, n, facts["causal"]) for n in lengths}}
            if decodes:
                measured[key]["token"] = {n: _token_seconds(heads, groups, n) for n in lengths}
        # softmax heads alone keep the same keys either way: what differs is a sequence, which the kernels compute
        below[site] = _crossover(measured[key], "prefill" if heads.replaced is None else objective)
        if objective == "memory":
            below[site] = min(below[site], plan.length // 8)
        for part, by_length in measured[key].items():
            for n, seconds in by_length.items():
                rows[part][n][0] += seconds[0]
                rows[part][n][1] += seconds[-1 if n >= below[site] else 0]
    found = {
        part: {str(n): {"exact": a, "planned": b} for n, (a, b) in by_length.items()}
        for part, by_length in rows.items()
        if part == "seconds" or decodes
    }
    return {**found, "cache": kept_share(plan), "exact_below": below}


def _crossover(measured: Mapping[str, Mapping[int, Sequence[float]]], objective: str) -> int:
    """The least of the lengths from which on the mean of last / first was never above 1."""
    wanted = {"seconds": ("seconds", "token"), "decode": ("token",), "memory": ("token",)}.get(objective, ("seconds",))
    parts = [measured[part] for part in wanted if part in measured]
    slower = [n for n in measured["seconds"] if parts and sum(x[n][-1] / x[n][0] for x in parts) > len(parts)]
    return max(slower) + 1 if slower else 0


def kept_share(plan: Plan) -> float:
    """Keys that the cache keeps at the length of the plan, relative to all."""
    kept = total = 0
    for site, choices in plan.sites.items():
        shared = len(choices) // plan.model["sites"][site].get("key_value_heads", len(choices))
        for first in range(0, len(choices), shared):
            kept += max(kept_keys(choice, plan.length) for choice in choices[first : first + shared])
            total += plan.length
    return kept / total


def _original(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of a model that was not rewritten."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


def _seconds(
    versions: Sequence[Callable[..., Tensor]], heads: int, groups: int, width: int, length: int, causal: bool
) -> list[float]:
    """Median time of a few calls on one sequence for each of the versions, in turns; fewer calls if they are slow."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, length, width, generator=generator) for h in (heads, groups, groups))
    times: list[list[float]] = [[] for _ in versions]
    other = _other_work(min(length, OTHER_ROWS), heads * width)
    with torch.no_grad():
        while len(times[0]) < 3 or (len(times[0]) <= REPEATS and sum(map(sum, times)) < SLOW):
            for version, own in zip(versions, times, strict=True):
                other()
                start = time.perf_counter()
                version(q, k, v, causal=causal, scale=width**-0.5)
                own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in times]  # the first call of a shape is slower


def _other_work(rows: int, width: int) -> Callable[[], Tensor]:
    """What a model does between two calls of attention, as far as the caches notice it."""
    x, weights = torch.ones(rows, width), torch.ones(width, max(1, OTHER_WEIGHTS // width))
    return lambda: x @ weights
