"""From the measurements of many texts to one Examination: means with spread, kinds with stability, a headline.

Every statistic counts the texts on which its measure exists; spectra are measured on some of the texts only.  A text
without a spectrum on which no rule before "low rank" fits is not judged.  The kind of a head is the most frequent one,
and its stability is its share of all texts, where the texts that are not judged count like those with a spectrum:

    share(kind) = count(kind) / texts                          uniform, positional, sink, local
                = count(kind) / judged' * undecided / texts    low rank, broad, dense

with undecided = texts on which no earlier rule fits, judged' = those among them that have a spectrum.  If none of them
has one, the rule "low rank" is left out.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination.measure.head_kinds import KINDS, NEED_SPECTRUM, HeadKind, describe, kind_of
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.measure.observe import Measurement
from headwise.examination.record import Examination, Mode, Record, Statistic


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
    with_spectra = [index for index, x in enumerate(measurements) if x.spectral]
    numbers = _stack([x.numbers for x in measurements])
    spectral = _stack([measurements[index].spectral for index in with_spectra])
    profile = torch.stack([x.profile for x in measurements]).mean(0)
    spectrum = _mean_spectrum([x.leading for x in measurements if x.leading is not None])
    heads = [(i, h) for i, site in enumerate(first.sites) for h in range(site.heads)]
    records = [
        Record(
            site=site,
            layer=first.sites[site].name,
            head=head,
            **_measures_and_kind(
                {name: x[:, row] for name, x in numbers.items()},
                {name: x[:, row] for name, x in spectral.items()},
                with_spectra,
                [x.lengths[site][1] for x in measurements],
            ),
            profile=[round(x, 6) for x in profile[row].tolist()],
            spectrum=[] if spectrum is None else [float(f"{x:.5g}") for x in spectrum[row].tolist()],
        )
        for row, (site, head) in enumerate(heads)
    ]
    layers = {name: _mean([x.layers[name] for x in measurements]).tolist() for name in first.layers}
    lengths = [sorted(x.lengths[i][1] for x in measurements) for i in range(len(first.sites))]
    known = {**records[0].measures, **records[0].modes}
    counts = {
        "texts": len(measurements),
        "spectra_texts": len(with_spectra),
        "spectra_exact": all(measurements[i].spectra_exact for i in with_spectra) if with_spectra else None,
        "shortest": min(n[0] for n in lengths),
        "longest": max(n[-1] for n in lengths),
        "digest": hashlib.sha256("".join(x.digest for x in measurements).encode()).hexdigest()[:16],
    }
    return Examination(
        model=model,
        inputs={**inputs, **counts},
        measures=[measure.to_dict() for measure in MEASURES.values() if measure.name in known],
        sites=[
            {**asdict(site), "shortest": n[0], "longest": n[-1]} for site, n in zip(first.sites, lengths, strict=True)
        ],
        records=records,
        layers={"names": first.blocks, **layers},
        redundancy=_mean([x.redundancy for x in measurements]).tolist(),
        headline=_headline(records, layers, counts, _possible_ranks(measurements, with_spectra)),
        provenance=provenance,
        excerpt=excerpt,
    )


def _measures_and_kind(
    numbers: dict[str, Tensor], spectral: dict[str, Tensor], with_spectra: list[int], lengths: list[int]
) -> dict[str, Any]:
    """Fields of a Record from the measures of one head: (texts,), and (texts with spectra,) for spectral ones."""
    every, some = ({name: x.tolist() for name, x in part.items()} for part in (numbers, spectral))
    texts = [{name: x[t] for name, x in every.items()} for t in range(len(lengths))]
    for place, t in enumerate(with_spectra):
        texts[t].update({name: x[place] for name, x in some.items()})
    kinds = _kinds(texts, lengths)
    counts = Counter(kind.name for kind in kinds if kind is not None)
    judged, shares = sum(counts.values()), _shares(counts, len(lengths))
    name = max(KINDS, key=lambda kind: shares[kind])
    # a description is about texts that one rule judged: their mean passes that rule too, as every rule is a half-space
    rules = Counter(kind for kind in kinds if kind is not None and kind.name == name)
    kind = min(rules, key=lambda rule: (-rules[rule], rule.evidence))
    alike = [x for x, other in zip(texts, kinds, strict=True) if other == kind]
    discrete = {measure for measure in every if MEASURES[measure].discrete}
    modes = {measure: _mode([x[measure] for x in alike]) for measure in kind.evidence if measure in discrete}
    means = {measure: sum(x[measure] for x in alike) / len(alike) for measure in kind.evidence if measure not in modes}
    both = {**every, **some}
    return {
        "kind": name,
        "description": describe(kind, means, modes),
        "evidence": {**means, **{measure: mode.value for measure, mode in modes.items()}},
        "evidence_texts": len(alike),
        "judged": judged,
        "kind_counts": dict(counts),
        "stability": shares[name] if judged > 1 else math.nan,
        "measures": {m: _statistic(x) for m, x in both.items() if m not in discrete},
        "modes": {measure: _mode(every[measure]) for measure in every if measure in discrete},
        "by_text": {m: [float(f"{x:.5g}") for x in both[m]] for m in both if MEASURES[m].compared},
    }


def _kinds(texts: list[dict[str, float]], lengths: list[int]) -> list[HeadKind | None]:
    """The kind on each text; None where it depends on a spectrum that other texts have and this one has not."""
    kinds = [kind_of(x, n) for x, n in zip(texts, lengths, strict=True)]
    if any(kind is not None and kind.name in NEED_SPECTRUM for kind in kinds):
        return kinds
    return [kind or kind_of(x, n, ignore_rank=True) for kind, x, n in zip(kinds, texts, lengths, strict=True)]


def _shares(counts: Mapping[str, int], texts: int) -> dict[str, float]:
    """Share of each kind among all texts, from the judged ones."""
    judged_by_spectrum = sum(counts.get(kind, 0) for kind in NEED_SPECTRUM)
    undecided = texts - sum(counts.values()) + judged_by_spectrum
    return {
        kind: counts.get(kind, 0)
        * (undecided / judged_by_spectrum if kind in NEED_SPECTRUM and undecided else 1)
        / texts
        for kind in KINDS
    }


def _headline(
    records: Sequence[Record], layers: Mapping[str, list], inputs: Mapping[str, Any], possible_ranks: list[float]
) -> list[str]:
    """A few sentences about the whole model, each with the number of texts it comes from."""
    texts, some = inputs["texts"], inputs["spectra_texts"]
    counts = Counter(record.kind for record in records)
    mix = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    low, high = inputs["shortest"], inputs["longest"]
    tokens = f"{high} tokens" if low == high else f"{low} to {high} tokens"
    lines = [f"{_count(len(records), 'head')}, judged on {_count(texts, 'text')} of {tokens}: {mix}."]
    fewer = sum(record.judged < texts for record in records)
    if fewer:
        lines.append(f"The kind of {_count(fewer, 'head')} depends on spectra, which {some} of {texts} texts have.")
    elif not some:
        lines.append("No spectra were taken: heads of low rank count as broad or dense.")
    ranks = [record.measures["effective_rank"].mean for record in records if "effective_rank" in record.measures]
    if ranks:
        few = sum(rank < most / 16 for rank, most in zip(ranks, possible_ranks, strict=True))
        many = sum(rank > most / 2 for rank, most in zip(ranks, possible_ranks, strict=True))
        exactness = "exact" if inputs["spectra_exact"] else f"estimated within {_largest_error(records):.0%}"
        lines.append(
            f"Effective ranks ({_mean_over(some)}, {exactness}) range from {min(ranks):.0f} to {max(ranks):.0f}: "
            f"{few} heads below n/16, {many} above n/2."
        )
    differences = layers.get("difference", [])
    if len(differences) > 1:
        lines.append(
            f"Differences between tokens ({_mean_over(texts)}) make up {differences[0]:.0%} of the hidden state before "
            f"the first layer and {differences[-1]:.0%} after the last."
        )
    unstable = sum(record.stability < 0.75 for record in records)
    if unstable:
        lines.append(f"{_count(unstable, 'head')} had another kind on more than a quarter of the texts.")
    return lines


def _possible_ranks(measurements: Sequence[Measurement], with_spectra: list[int]) -> list[float]:
    """For every head, the largest rank that P can have: min(m, n), mean over the texts with spectra."""
    texts = [[min(size) for size in measurements[index].lengths] for index in with_spectra]
    heads = [i for i, site in enumerate(measurements[0].sites) for _ in range(site.heads)]
    return [sum(text[site] for text in texts) / len(texts) for site in heads] if texts else []


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _largest_error(records: Sequence[Record]) -> float:
    """Of estimated effective ranks, relative to them."""
    return max(x.measures["effective_rank_error"].mean / x.measures["effective_rank"].mean for x in records)


def _mean_over(texts: int) -> str:
    return "of one text" if texts == 1 else f"mean over {texts} texts"


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


def _statistic(values: Sequence[float]) -> Statistic:
    x = [value for value in values if not math.isnan(value)]
    if not x:
        return Statistic(math.nan, math.nan, math.nan, math.nan, 0)
    mean = sum(x) / len(x)
    std = math.sqrt(sum((value - mean) ** 2 for value in x) / (len(x) - 1)) if len(x) > 1 else math.nan
    return Statistic(mean, std, min(x), max(x), len(x))


def _mode(values: Sequence[float]) -> Mode:
    """The most frequent value; of equally frequent ones the smallest."""
    counts = Counter(values)
    value = min(counts, key=lambda x: (-counts[x], abs(x), x))
    return Mode(value, counts[value], len(values))
