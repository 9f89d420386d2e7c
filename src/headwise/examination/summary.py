"""From the measurements of many texts to one Examination: means with spread, kinds with stability, a headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination.measure.head_kinds import KINDS, kind_of
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.measure.observe import Measurement
from headwise.examination.record import Examination, Record, Statistic


def summarise(
    measurements: Sequence[Measurement],
    *,
    model: Mapping[str, Any],
    inputs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    excerpt: Mapping[str, Any],
) -> Examination:
    """One Examination from all texts.  The order of `measurements` does not matter beyond rounding."""
    first = measurements[0]
    for other in measurements[1:]:
        if other.sites != first.sites:
            raise InputError(
                f"the model attends at {len(first.sites)} sites on one text and at {len(other.sites)} on another; "
                "examine texts of one kind at a time"
            )
    with_spectra = [x for x in measurements if x.spectral]
    numbers, spectral = _stack([x.numbers for x in measurements]), _stack([x.spectral for x in with_spectra])
    profile = torch.stack([x.profile for x in measurements]).mean(0)
    spectrum = _mean_spectrum([x.leading for x in with_spectra if x.leading is not None])
    heads = [(i, h) for i, site in enumerate(first.sites) for h in range(site.heads)]
    records = [
        Record(
            site=site,
            layer=first.sites[site].name,
            head=head,
            **_measures_and_kind(
                {name: x[:, row] for name, x in numbers.items()},
                {name: x[:, row] for name, x in spectral.items()},
                [x.lengths[site][1] for x in measurements],
            ),
            profile=[round(x, 6) for x in profile[row].tolist()],
            spectrum=[] if spectrum is None else [float(f"{x:.5g}") for x in spectrum[row].tolist()],
        )
        for row, (site, head) in enumerate(heads)
    ]
    layers = {name: _mean([x.layers[name] for x in measurements]).tolist() for name in first.layers}
    n = max(n for x in measurements for _, n in x.lengths)
    return Examination(
        model=model,
        inputs={**inputs, "texts": len(measurements), "spectra_texts": len(with_spectra), "longest": n},
        measures=[measure.to_dict() for measure in MEASURES.values() if measure.name in records[0].measures],
        sites=[asdict(site) for site in first.sites],
        records=records,
        layers={"names": first.blocks, **layers},
        redundancy=_mean([x.redundancy for x in measurements]).tolist(),
        headline=_headline(records, layers, n, exact=all(x.spectra_exact for x in with_spectra)),
        provenance=provenance,
        excerpt=excerpt,
    )


def _measures_and_kind(numbers: dict[str, Tensor], spectral: dict[str, Tensor], lengths: list[int]) -> dict[str, Any]:
    """Fields of a Record from the measures of one head: (texts,) and (texts with spectra,) each."""
    measures = {name: _statistic(x) for name, x in {**numbers, **spectral}.items()}
    # spectra are measured on some of the texts; their mean stands for the others
    means = {name: x.mean().item() for name, x in spectral.items()}
    by_text = [
        kind_of({**{name: x[t].item() for name, x in numbers.items()}, **means}, n) for t, n in enumerate(lengths)
    ]
    counts = Counter(kind.name for kind in by_text)
    name = max(KINDS, key=lambda kind: counts[kind])
    on_average = kind_of({key: value.mean for key, value in measures.items()}, round(sum(lengths) / len(lengths)))
    kind = on_average if on_average.name == name else next(kind for kind in by_text if kind.name == name)
    return {
        "kind": name,
        "description": kind.description,
        "evidence": dict(kind.evidence),
        "stability": counts[name] / len(lengths),
        "kind_counts": dict(counts),
        "measures": measures,
    }


def _headline(records: Sequence[Record], layers: Mapping[str, list], n: int, *, exact: bool) -> list[str]:
    """A few sentences about the whole model."""
    counts = Counter(record.kind for record in records)
    mix = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    lines = [f"{len(records)} heads on texts of up to {n} tokens: {mix}."]
    ranks = sorted(r.measures["effective_rank"].mean for r in records if "effective_rank" in r.measures)
    if ranks:
        estimate = "" if exact else " (upper estimates at this length)"
        low, high = sum(rank < n / 16 for rank in ranks), sum(rank > n / 2 for rank in ranks)
        lines.append(
            f"Effective ranks range from {ranks[0]:.0f} to {ranks[-1]:.0f}{estimate}: "
            f"{low} heads below n/16, {high} above n/2."
        )
    differences = layers.get("difference", [])
    if len(differences) > 1:
        lines.append(
            f"Differences between tokens make up {differences[0]:.0%} of the hidden state before the first layer and "
            f"{differences[-1]:.0%} after the last."
        )
    unstable = sum(record.stability < 0.75 for record in records)
    if unstable:
        lines.append(f"{unstable} heads change their kind on more than a quarter of the texts.")
    return lines


def unusual_heads(records: Sequence[Record], count: int = 10) -> list[Record]:
    """The heads farthest from the median head, in units of the median deviation, over measures marked `unusual`."""
    distance = [0.0] * len(records)
    for name in (measure.name for measure in MEASURES.values() if measure.unusual):
        values = [r.measures[name].mean for r in records if name in r.measures]
        if len(values) < len(records):
            continue
        median = sorted(values)[len(values) // 2]
        deviation = sorted(abs(x - median) for x in values)[len(values) // 2] or 1e-9
        distance = [max(old, abs(x - median) / deviation) for old, x in zip(distance, values, strict=True)]
    chosen: list[int] = []
    for i in sorted(range(len(records)), key=lambda i: -distance[i]):
        # at most three of a kind: ten local heads would tell the reader one thing ten times
        if sum(records[j].kind == records[i].kind for j in chosen) < 3:
            chosen.append(i)
    return [records[i] for i in sorted(chosen[:count])]


def _stack(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _mean(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).double().nanmean(0)


def _mean_spectrum(rows: list[Tensor]) -> Tensor | None:
    """Mean over texts of singular values, cut to the shortest."""
    if not rows:
        return None
    width = min(x.shape[-1] for x in rows)
    return torch.stack([x[:, :width] for x in rows]).mean(0)


def _statistic(x: Tensor) -> Statistic:
    return Statistic(x.mean().item(), x.std(correction=0).item(), x.min().item(), x.max().item(), len(x))
