"""Every number that is measured of a head, each defined once.

To add a measure, register one function here or in your own code before calling `examine`:

    @register_measure(of=HeadSums, label="weight on the last key", unit="share", formula="mean_i P_in",
                      meaning="How much of the attention goes to the last key.", shown=True)
    def last_key(x: HeadSums) -> Tensor:
        return x.received[:, -1]

The function receives the heads of one attention call on one text, as `HeadSums` (all heads at once) or as
`HeadSpectrum` (one head).  Everything else follows from the registration: the name in report.json with mean, standard
deviation, minimum and maximum over texts, its explanation in the `measures` table of report.json, the list "colour by"
and the table of numbers on the page, `headwise compare`, the choice of unusual heads, and the table in the
documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination.measure.spectra import HeadSpectrum
from headwise.examination.measure.streaming import HeadSums
from headwise.linalg import ranks

WINDOWS = (1, 4, 16, 64)
"""Half-widths w of `mass_within_w`."""

RANKS = (8, 16, 32, 64, 128, 256)
"""Ranks r of `energy_r` and `output_error_r`."""


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """Outputs of the heads of one call and the rows of the output projection that each meets."""

    output_gram: Tensor  # (h, d, d) O^T O
    weight: Tensor  # (h, d, width) W_O


@dataclass(frozen=True)
class Measure:
    """A number of a head: its definition, and where it is used."""

    name: str
    label: str  # on the page
    formula: str
    meaning: str
    unit: str
    shown: bool  # among the first of the list "colour by"
    compared: bool  # `headwise compare` looks for changes of it
    unusual: bool  # a head far from the median head counts as unusual
    of: type  # what `compute` takes
    compute: Callable[[Any], Any]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("of", "compute")}


MEASURES: dict[str, Measure] = {}
"""name -> Measure, in the order of registration"""


def register_measure(
    *,
    of: type,
    formula: str,
    meaning: str,
    unit: str = "",
    name: str | None = None,
    label: str | None = None,
    shown: bool = False,
    compared: bool = False,
    unusual: bool = False,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorator that adds a function of `HeadSums` -> (h,) or of `HeadSpectrum` -> float to the measures.

    name   default: the name of the function
    label  default: the name with spaces
    """

    def add(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        key = name or compute.__name__
        if key in MEASURES:
            raise InputError(f"register_measure: there is a measure {key!r} already; choose another name")
        words = label or key.replace("_", " ")
        MEASURES[key] = Measure(key, words, formula, meaning, unit, shown, compared, unusual, of, compute)
        return compute

    return add


def evaluate(x: HeadSums | HeadProjection) -> dict[str, Tensor]:
    """name -> (h,) float64 for every measure of this type."""
    # cloned: a view of one number would keep the whole array it was taken from
    return {name: m.compute(x).double().clone() for name, m in MEASURES.items() if m.of is type(x)}


def evaluate_spectra(heads: list[HeadSpectrum]) -> dict[str, Tensor]:
    """name -> (h,) float64 for every spectral measure."""
    spectral = {name: m for name, m in MEASURES.items() if m.of is HeadSpectrum}
    return {
        name: torch.tensor([m.compute(head) for head in heads], dtype=torch.float64) for name, m in spectral.items()
    }


def measures_table() -> str:
    """The Markdown table of all measures in docs/report-schema.md."""
    rows = [f"| `{m.name}` | {m.formula} | {m.unit} | {m.meaning} |" for m in MEASURES.values()]
    return "\n".join(["| measure | definition | unit | meaning |", "|---|---|---|---|", *rows])


# ---- spectrum: sigma_1 >= sigma_2 >= ... the singular values of P ----


@register_measure(
    of=HeadSpectrum,
    formula="exp(−Σ pᵢ log pᵢ), pᵢ = σᵢ / Σ σ",
    meaning="How many directions P uses; 1 for a head that averages, n for a shift (Roy & Vetterli 2007).",
    unit="directions",
    shown=True,
    compared=True,
    unusual=True,
)
def effective_rank(x: HeadSpectrum) -> float:
    return ranks.effective_rank_bounds(x.spectrum)[1].item()  # of a truncated spectrum, an upper bound


@register_measure(
    of=HeadSpectrum,
    formula="‖P‖²_F / σ₁²",
    meaning="A rank that small singular values hardly change.",
    unit="directions",
)
def stable_rank(x: HeadSpectrum) -> float:
    return ranks.stable_rank(x.spectrum).item()


@register_measure(
    of=HeadSpectrum,
    formula="number of σᵢ > 10⁻³ σ₁",
    meaning="The rank to three digits.",
    unit="directions",
)
def numeric_rank(x: HeadSpectrum) -> float:
    return float((x.values > 1e-3 * x.values[0].item()).sum().item())


@register_measure(
    of=HeadSpectrum,
    formula="σ₁",
    meaning="The largest singular value: 1 for a head that averages or shifts, up to √n for a sink.",
)
def sigma_1(x: HeadSpectrum) -> float:
    return x.values[0].item()


@register_measure(
    of=HeadSpectrum,
    formula="σ₂ / σ₁",
    meaning="How much is left beside the leading direction.",
    unit="share",
)
def sigma_ratio(x: HeadSpectrum) -> float:
    return (x.values[1].item() / x.values[0].item()) if len(x.values) > 1 else 0.0


def _energy(x: HeadSpectrum, r: int) -> float:
    return 1.0 if r >= x.spectrum.count else ranks.energy(x.spectrum)[r - 1].item()


def _output_error(x: HeadSpectrum, r: int) -> float:
    if r >= x.spectrum.count:
        return 0.0
    # summed from the small end if all values are known: no cancellation where the error is small
    remaining = x.output_shares[r:].sum().item() if x.spectrum.exact else 1 - x.output_shares[:r].sum().item()
    return math.sqrt(max(0.0, remaining))


for _r in RANKS:
    register_measure(
        of=HeadSpectrum,
        name=f"energy_{_r}",
        label=f"energy at rank {_r}",
        formula=f"Σ_(i ≤ {_r}) σᵢ² / ‖P‖²_F",
        meaning=f"Share of ‖P‖² that the best matrix of rank {_r} keeps; misleading where a sink dominates P.",
        unit="share",
    )(lambda x, r=_r: _energy(x, r))
    register_measure(
        of=HeadSpectrum,
        name=f"output_error_{_r}",
        label=f"output error at rank {_r}",
        formula=f"‖(P − P_{_r}) V‖ / ‖P V‖",
        meaning=f"Relative error of the head's output if P is replaced by the best matrix of rank {_r}.",
        unit="share",
        shown=_r in (16, 64),
        compared=_r == 64,
        unusual=_r == 64,
    )(lambda x, r=_r: _output_error(x, r))


# ---- sharpness: H_i = -sum_j P_ij log P_ij, the entropy of query i ----


@register_measure(
    of=HeadSums,
    label="entropy",
    formula="mean_i H_i, H_i = −Σ_j P_ij log P_ij",
    meaning="How widely a query spreads its attention: exp(H) is the number of keys of an equal spread.",
    unit="nats",
    shown=True,
    compared=True,
)
def entropy(x: HeadSums) -> Tensor:
    return x.entropy.mean(-1)


for _name, _q, _words in (
    ("entropy_min", 0.0, "The sharpest query."),
    ("entropy_q10", 0.1, "A tenth of the queries are sharper."),
    ("entropy_median", 0.5, "Half of the queries are sharper."),
    ("entropy_q90", 0.9, "A tenth of the queries are broader."),
):
    register_measure(of=HeadSums, name=_name, formula=f"quantile {_q:g} over i of H_i", meaning=_words, unit="nats")(
        lambda x, q=_q: x.entropy.sort(-1).values[:, (x.m - 1) // 2 if q == 0.5 else round(q * (x.m - 1))]
    )


@register_measure(
    of=HeadSums,
    label="entropy, share of the largest possible",
    formula="mean_i H_i / log(number of keys query i may attend to)",
    meaning="0: attends to a single key; 1: averages over all keys.",
    unit="share",
    shown=True,
    unusual=True,
)
def entropy_share(x: HeadSums) -> Tensor:
    uniform = x.visible.clamp(min=1).log()
    return torch.where(uniform > 0, x.entropy / uniform.clamp(min=1e-9), torch.ones(())).mean(-1)


@register_measure(
    of=HeadSums,
    formula="mean_i log(number of keys) − H_i",
    meaning="Kullback–Leibler divergence from the average over all keys.",
    unit="nats",
)
def distance_to_uniform(x: HeadSums) -> Tensor:
    return (x.visible.clamp(min=1).log() - x.entropy).clamp(min=0).mean(-1)


@register_measure(of=HeadSums, formula="max_ij S_ij", meaning="The largest score before the softmax.", shown=True)
def largest_score(x: HeadSums) -> Tensor:
    return x.largest_score


@register_measure(
    of=HeadSums,
    formula="mean_i max_j P_ij",
    meaning="The weight of the most attended key, on average over queries.",
    unit="share",
)
def row_maximum(x: HeadSums) -> Tensor:
    return x.row_maximum.mean(-1)


@register_measure(
    of=HeadSums, formula="‖P‖_F", meaning="1 for a head that averages, √n for one that attends to single keys."
)
def frobenius(x: HeadSums) -> Tensor:
    return x.frobenius_squared.sqrt()


# ---- sinks: c_j = mean_i P_ij, what key j receives ----


@register_measure(
    of=HeadSums,
    label="largest share on one key",
    formula="max_j c_j, c_j = mean_i P_ij",
    meaning="Share of all attention that goes to the most attended key.",
    unit="share",
    shown=True,
    compared=True,
    unusual=True,
)
def sink_mass(x: HeadSums) -> Tensor:
    return x.received.amax(-1)


@register_measure(of=HeadSums, formula="argmax_j c_j", meaning="Position of the most attended key.", unit="position")
def sink_position(x: HeadSums) -> Tensor:
    return x.received.argmax(-1)


@register_measure(
    of=HeadSums, formula="c_0", meaning="Share of all attention that goes to the first key.", unit="share"
)
def first_mass(x: HeadSums) -> Tensor:
    return x.received[:, 0]


# ---- position: mass(delta) = mean_i P_(i, i + delta), the weight at offset delta = j - i ----

for _name, _offset, _words in (
    ("diagonal_mass", 0, "Weight of the query's own position."),
    ("previous_mass", -1, "Weight of the previous token."),
    ("next_mass", 1, "Weight of the next token."),
):
    register_measure(of=HeadSums, name=_name, formula=f"mass({_offset})", meaning=_words, unit="share")(
        lambda x, offset=_offset: x.mass_at(offset)
    )

for _w in WINDOWS:
    register_measure(
        of=HeadSums,
        name=f"mass_within_{_w}",
        label=f"mass within ±{_w}",
        formula=f"Σ_(−{_w} ≤ δ ≤ {_w}) mass(δ), mass(δ) = mean_i P_(i, i+δ)",
        meaning=f"Weight of keys at most {_w} token{'s' * (_w > 1)} away.",
        unit="share",
        shown=_w == 16,
        compared=_w == 16,
        unusual=_w == 16,
    )(lambda x, w=_w: x.mass_within(w))


@register_measure(
    of=HeadSums,
    formula="Σ_δ δ mass(δ)",
    meaning="Mean offset from the query to the keys it attends to; negative is before it.",
    unit="tokens",
)
def offset_mean(x: HeadSums) -> Tensor:
    return x.offset_mass @ x.offsets


@register_measure(
    of=HeadSums,
    formula="(Σ_δ δ² mass(δ) − offset_mean²)^½",
    meaning="Standard deviation of that offset.",
    unit="tokens",
)
def offset_spread(x: HeadSums) -> Tensor:
    return (x.offset_mass @ x.offsets.square() - offset_mean(x).square()).clamp(min=0).sqrt()


@register_measure(
    of=HeadSums,
    formula="δ* = argmax_δ (mass(δ) m)² / length(δ)",
    meaning="The offset of the shift that is closest to P.",
    unit="tokens",
)
def best_offset(x: HeadSums) -> Tensor:
    return x.offsets[x.diagonal_energy.argmax(-1)]


@register_measure(
    of=HeadSums,
    label="mass on the best offset",
    formula="mass(δ*)",
    meaning="Weight of the one offset that describes the head best.",
    unit="share",
    shown=True,
    unusual=True,
)
def best_offset_mass(x: HeadSums) -> Tensor:
    return x.offset_mass.gather(-1, x.diagonal_energy.argmax(-1, keepdim=True)).squeeze(-1)


@register_measure(
    of=HeadSums,
    formula="min_c ‖P − c · shift(δ*)‖ / ‖P‖",
    meaning="Distance from the best multiple of one shift.",
    unit="share",
)
def best_offset_error(x: HeadSums) -> Tensor:
    return (1 - x.diagonal_energy.amax(-1) / x.frobenius_squared).clamp(min=0).sqrt()


@register_measure(
    of=HeadSums,
    label="error of the best Toeplitz matrix",
    formula="min_T ‖P − T‖ / ‖P‖ over Toeplitz T; T has the diagonal means of P",
    meaning="Distance from attention that depends on j − i alone; 0 for a purely positional head.",
    unit="share",
    shown=True,
    compared=True,
)
def toeplitz_error(x: HeadSums) -> Tensor:
    return (1 - x.diagonal_energy.sum(-1) / x.frobenius_squared).clamp(min=0).sqrt()


# ---- output ----


@register_measure(of=HeadSums, formula="‖P V‖_F", meaning="Size of the head's output.")
def output_norm(x: HeadSums) -> Tensor:
    return torch.linalg.matrix_norm(x.output)


@register_measure(of=HeadSums, formula="‖V‖_F", meaning="Size of the head's values.")
def value_norm(x: HeadSums) -> Tensor:
    return torch.linalg.matrix_norm(x.values)


@register_measure(
    of=HeadProjection,
    label="norm added to the residual stream",
    formula="‖P V W_O‖_F, from ⟨Oᵀ O, W_O W_Oᵀ⟩ with O = P V",
    meaning="What the head adds to the residual stream.",
    shown=True,
    compared=True,
)
def contribution(x: HeadProjection) -> Tensor:
    return (x.output_gram * (x.weight @ x.weight.mT)).sum((-2, -1)).clamp(min=0).sqrt()
