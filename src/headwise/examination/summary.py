"""From the measurements of many texts to one Examination: means with spread, kinds with stability, a headline.

Every statistic counts the texts on which its measure exists; spectra are measured on some of the texts only.  A text
without a spectrum on which no rule before "low rank" fits is not judged.  The kind of a head is the most frequent one,
and its stability is its share of all texts, where the texts that are not judged count like those with a spectrum:

    share(kind) = count(kind) / texts                          kinds before "low rank"
                = count(kind) / judged' * undecided / texts    low rank, dense

with undecided = texts on which no earlier rule fits, judged' = those among them that have a spectrum.  If none of them
has one, the rule "low rank" is left out.  Scores on repeated random tokens do not depend on the text: their mean counts
on every text.  A trait is a rule other than that of the kind which fits on at least half of the texts.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination.measure.head_kinds import (
    KINDS,
    NEED_SPECTRUM,
    TRAITS,
    HeadKind,
    describe,
    kind_of,
    low_rank,
    traits_of,
)
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.measure.observe import ExaminedSite, Measurement
from headwise.examination.record import Examination, Mode, Record, statistic
from headwise.models.inputs import TEXT_WORDS, in_words


def _settled(measurement: Measurement, lengths: Sequence[tuple[int, int]] | None = None) -> list[ExaminedSite]:
    """The sites as texts of these lengths show them: attention to a single key is not known to be causal."""
    lengths = measurement.lengths if lengths is None else lengths
    if len(lengths) != len(measurement.sites):
        return measurement.sites
    return [
        replace(site, causal=False) if n == 1 else site for site, (_, n) in zip(measurement.sites, lengths, strict=True)
    ]


def summarise(
    measurements: Sequence[Measurement],
    *,
    model: Mapping[str, Any],
    inputs: Mapping[str, Any],
    provenance: Mapping[str, Any],
    excerpt: Mapping[str, Any],
) -> Examination:
    """One Examination from all texts.  The order of `measurements` does not matter beyond rounding."""
    first = max(measurements, key=lambda x: max(x.lengths))
    for other in measurements:
        if _settled(other) != _settled(first, other.lengths):
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
                inputs.get("words", TEXT_WORDS),
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
        headline=_headline(records, {"names": first.blocks, **layers}, {**inputs, **counts}),
        provenance=provenance,
        excerpt=excerpt,
    )


def _measures_and_kind(
    numbers: dict[str, Tensor],
    spectral: dict[str, Tensor],
    with_spectra: list[int],
    lengths: list[int],
    words: Mapping[str, str],
) -> dict[str, Any]:
    """Fields of a Record from the measures of one head: (texts,), and (texts with spectra,) for spectral ones."""
    every, some = ({name: x.tolist() for name, x in part.items()} for part in (numbers, spectral))
    texts = [{name: x[t] for name, x in every.items()} for t in range(len(lengths))]
    for place, t in enumerate(with_spectra):
        texts[t].update({name: x[place] for name, x in some.items()})
    for measure in (name for name in every if name.endswith("_score")):
        score = statistic(every[measure]).mean
        for x in texts:
            x[measure] = score
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
    traits = _traits(texts, lengths, name)
    description = describe(kind, means, modes)
    if kind.evidence[0].endswith("_score") and "sink" in traits:
        description += f"; on these texts {statistic(every['sink_mass']).mean:.0%} of its attention goes to one token"
    return {
        "kind": name,
        "traits": traits,
        "description": in_words(description, words),
        "evidence": {**means, **{measure: mode.value for measure, mode in modes.items()}},
        "evidence_texts": len(alike),
        "judged": judged,
        "kind_counts": dict(counts),
        "stability": shares[name] if judged > 1 else math.nan,
        "measures": {m: statistic(x) for m, x in both.items() if m not in discrete},
        "modes": {measure: _mode(every[measure]) for measure in every if measure in discrete},
        "by_text": {m: [float(f"{x:.5g}") for x in both[m]] for m in both if MEASURES[m].compared},
    }


def _kinds(texts: list[dict[str, float]], lengths: list[int]) -> list[HeadKind | None]:
    """The kind on each text; None where it depends on a spectrum that other texts have and this one has not."""
    kinds = [kind_of(x, n) for x, n in zip(texts, lengths, strict=True)]
    if any(kind is not None and kind.name in NEED_SPECTRUM for kind in kinds):
        return kinds
    return [kind or kind_of(x, n, ignore_rank=True) for kind, x, n in zip(kinds, texts, lengths, strict=True)]


def _traits(texts: list[dict[str, float]], lengths: list[int], kind: str) -> list[str]:
    """Rules other than that of the kind that fit on at least half of the texts (low rank: of those with a spectrum)."""
    counts = Counter(trait for x, n in zip(texts, lengths, strict=True) for trait in traits_of(x, n))
    spectra = sum(f"output_error_{low_rank(n)}" in x for x, n in zip(texts, lengths, strict=True))
    names = (name for name in (*KINDS, *TRAITS) if name != kind and counts[name])
    return [name for name in names if 2 * counts[name] >= (spectra if name == "low rank" else len(texts))]


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


def _headline(records: Sequence[Record], layers: Mapping[str, list], inputs: Mapping[str, Any]) -> list[str]:
    """A few sentences about the whole model, each with what it comes from; what to do about it is the advice."""
    texts, some = inputs["texts"], inputs["spectra_texts"]
    words = {**TEXT_WORDS, **inputs.get("words", {})}
    items, units = f"{texts} {words['item' if texts == 1 else 'items']}", words["units"]
    counts = Counter(record.kind for record in records)
    mix = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    low, high = inputs["shortest"], inputs["longest"]
    length = f"{high} {words['unit'] if high == 1 else units}" if low == high else f"{low} to {high} {units}"
    lines = [f"{_count(len(records), 'head')}, judged on {items} of {length}: {mix}."]
    fewer = sum(record.judged < texts for record in records)
    if fewer:
        lines.append(f"The kind of {_count(fewer, 'head')} depends on spectra, which {some} of {items} have.")
    elif not some:
        lines.append("No spectra were taken: heads of low rank count as dense.")
    unstable = sum(record.stability < 0.75 for record in records)
    if unstable:
        lines.append(f"{_count(unstable, 'head')} had another kind on more than a quarter of the {words['items']}.")
    ranks = [record.measures["effective_rank"].mean for record in records if "effective_rank" in record.measures]
    if ranks:
        exactness = "exact" if inputs["spectra_exact"] else f"estimated within {_largest_error(records):.0%}"
        mean = f"of one {words['item']}" if some == 1 else f"mean over {some} {words['items']}"
        lines.append(f"Effective ranks ({mean}, {exactness}) range from {min(ranks):.0f} to {max(ranks):.0f}.")
    ends = _ends(layers)
    if ends and high > 1:  # a single one differs from nothing
        each = [
            f"{first:.0%} of the hidden state before the first layer and {last:.0%} after the last"
            + (f" in {name}" if len(ends) > 1 else "")
            for name, (first, last) in ends.items()
        ]
        lines.append(f"Differences between {units} are {'; '.join(each)}.")
    return lines


def _ends(layers: Mapping[str, list]) -> dict[str, tuple[float, float]]:
    """list of blocks -> the share of differences before its first block and after its last."""
    found: dict[str, list[float]] = {}
    name = ""
    for state, difference in zip(layers.get("names", []), layers.get("difference", []), strict=False):
        name = state.removesuffix(" in") if state.endswith(" in") else name
        found.setdefault(name, []).append(difference)
    return {name: (x[0], x[-1]) for name, x in found.items() if len(x) > 1}


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _largest_error(records: Sequence[Record]) -> float:
    """Of estimated effective ranks, relative to them."""
    return max(x.measures["effective_rank_error"].mean / x.measures["effective_rank"].mean for x in records)


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
    """name -> (texts, heads); NaN on texts on which it was not measured."""
    names = dict.fromkeys(name for row in rows for name in row)
    unknown = {name: torch.full_like(next(row[name] for row in rows if name in row), math.nan) for name in names}
    return {name: torch.stack([row.get(name, unknown[name]) for row in rows]) for name in names}


def _mean(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).double().nanmean(0)


def _mean_spectrum(rows: list[Tensor]) -> Tensor | None:
    """Mean over texts of singular values, cut to the shortest."""
    if not rows:
        return None
    width = min(x.shape[-1] for x in rows)
    return torch.stack([x[:, :width] for x in rows]).mean(0)


def _mode(values: Sequence[float]) -> Mode:
    """The most frequent value; of equally frequent ones the smallest."""
    counts = Counter(values)
    value = min(counts, key=lambda x: (-counts[x], abs(x), x))
    return Mode(value, counts[value], len(values))
