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
from headwise.examination.measure.observe import Measurement
from headwise.examination.record import Examination, Record, Statistic


def summarise(
    measurements: Sequence[Measurement],
    *,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    made: Mapping[str, Any],
) -> Examination:
    """One Examination from all texts.  The order of `measurements` does not matter beyond rounding."""
    first = measurements[0]
    for other in measurements[1:]:
        if other.sites != first.sites:
            raise InputError(
                f"the model attends at {len(first.sites)} places on one text and at {len(other.sites)} on another; "
                "examine texts of one kind at a time"
            )
    n = max(n for x in measurements for _, n in x.lengths)
    numbers = _stack([x.numbers for x in measurements])
    ranked = [x for x in measurements if x.spectral]
    spectral = _stack([x.spectral for x in ranked])
    profile = torch.stack([x.profile for x in measurements]).mean(0)
    leading = _mean_of_ragged([x.leading for x in ranked if x.leading is not None])
    records = []
    places = [(i, h) for i, site in enumerate(first.sites) for h in range(site.heads)]
    for row, (site, head) in enumerate(places):
        lengths = [x.lengths[site][1] for x in measurements]
        records.append(
            _record(row, site, head, first.sites[site].name, numbers, spectral, profile[row], leading, lengths)
        )
    layers = {name: _mean(torch.stack([x.layers[name] for x in measurements])).tolist() for name in first.layers}
    redundancy = _mean(torch.stack([x.redundancy for x in measurements]))
    return Examination(
        model=model,
        data={**data, "texts": len(measurements), "spectra_texts": len(ranked), "longest": n},
        sites=[asdict(site) for site in first.sites],
        records=records,
        layers={"names": first.blocks, **layers},
        redundancy=redundancy.tolist(),
        headline=headline(records, layers, n, exact=all(x.spectra_exact for x in ranked)),
        made=made,
    )


def _record(
    row: int,
    site: int,
    head: int,
    layer: str,
    numbers: dict[str, Tensor],
    spectral: dict[str, Tensor],
    profile: Tensor,
    leading: Tensor | None,
    lengths: list[int],
) -> Record:
    measures = {name: _statistic(x[:, row]) for name, x in {**numbers, **spectral}.items()}
    ranks = {name: x[:, row].mean().item() for name, x in spectral.items()}
    # ranks are measured on a sample of the texts; their mean stands for the others
    each = [
        kind_of({**{name: x[t, row].item() for name, x in numbers.items()}, **ranks}, lengths[t])
        for t in range(len(lengths))
    ]
    counts = Counter(kind.name for kind in each)
    name = max(KINDS, key=lambda kind: counts[kind])
    typical = kind_of({key: value.mean for key, value in measures.items()}, round(sum(lengths) / len(lengths)))
    chosen = typical if typical.name == name else next(kind for kind in each if kind.name == name)
    return Record(
        site=site,
        layer=layer,
        head=head,
        kind=name,
        words=chosen.words,
        because=dict(chosen.because),
        stability=counts[name] / len(lengths),
        kinds=dict(counts),
        measures=measures,
        profile=[round(x, 6) for x in profile.tolist()],
        spectrum=[] if leading is None else [float(f"{x:.5g}") for x in leading[row].tolist()],
    )


def headline(records: Sequence[Record], layers: Mapping[str, list], n: int, *, exact: bool = True) -> list[str]:
    """Three sentences in plain words."""
    counts = Counter(record.kind for record in records)
    mix = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    lines = [f"{len(records)} heads on texts of up to {n} tokens: {mix}."]
    ranks = sorted(r.measures["effective_rank"].mean for r in records if "effective_rank" in r.measures)
    if ranks:
        estimate = "" if exact else " (an upper estimate at this length)"
        low = sum(rank < n / 16 for rank in ranks)
        high = sum(rank > n / 2 for rank in ranks)
        lines.append(
            f"Effective rank runs from {ranks[0]:.0f} to {ranks[-1]:.0f}{estimate}: "
            f"{low} heads below n/16, {high} above n/2."
        )
    differences = layers.get("difference", [])
    if len(differences) > 1:
        lines.append(
            f"What tells tokens apart is {differences[0]:.0%} of the hidden state before the first layer and "
            f"{differences[-1]:.0%} after the last."
        )
    shaky = sum(record.stability < 0.75 for record in records)
    if shaky:
        lines.append(f"{shaky} heads change their kind on more than a quarter of the texts.")
    return lines


def _stack(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _mean(x: Tensor) -> Tensor:
    return x.double().nanmean(0)


def _mean_of_ragged(rows: list[Tensor]) -> Tensor | None:
    """Mean over texts of spectra, cut to the shortest."""
    if not rows:
        return None
    width = min(x.shape[-1] for x in rows)
    return torch.stack([x[:, :width] for x in rows]).mean(0)


def _statistic(x: Tensor) -> Statistic:
    return Statistic(
        mean=x.mean().item(),
        std=x.std(correction=0).item(),
        min=x.min().item(),
        max=x.max().item(),
        texts=len(x),
    )
