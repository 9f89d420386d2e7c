"""Every number that is measured of a head, each defined once.

To add a measure, register one function, here or in your own code before calling `examine`:

    @register_measure(of=HeadSums, label="weight of the last key", unit="share", shown=True)
    def last_key(x: HeadSums) -> Tensor:
        \"\"\"mean_i P_in: how much of the attention goes to the last key.\"\"\"
        return x.received[:, -1]

The function receives the heads of one attention call on one text, as `HeadSums` (all heads at once) or as
`HeadSpectrum` (one head); its docstring is "formula: meaning".  Everything else follows from the registration: mean,
standard deviation, minimum and maximum over texts in report.json (of a `discrete` one, the most frequent value and the
number of texts that have it), the explanation in its `measures` table, the list "colour by" and the table of numbers on
the page, `headwise compare`, the choice of unusual heads, and the table in docs/reference/report-json.md.

Letters: m queries, n keys; σ_1 ≥ σ_2 ≥ … the singular values of P; H_i = −Σ_j P_ij log P_ij the entropy of query i;
c_j = mean_i P_ij what key j receives; w(δ) = mean_i P_(i, i+δ) the weight at offset δ = j − i; t_i the token at i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.examination.measure.repeated_tokens import RepeatedTokenScores
from headwise.examination.measure.spectra import HeadSpectrum
from headwise.examination.measure.streaming import HeadSums
from headwise.examination.measure.token_patterns import DelimiterWeights, TokenWeights
from headwise.linalg import ranks


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """Outputs of the heads of one call and the rows of the output projection that each meets."""

    output_gram: Tensor  # (h, d, d) O^T O, O = P V
    weight: Tensor  # (h, d, width) W_O


@dataclass(frozen=True, eq=False)
class HeadImportance:
    """Change of the model's answer when a head's output is replaced by its mean over tokens, (h,); see `importance`."""

    change: Tensor


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
    discrete: bool  # a position or offset: its most frequent value over texts is reported, not a mean
    of: type  # what `compute` takes
    compute: Callable[[Any], Any]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("of", "compute")}


MEASURES: dict[str, Measure] = {}
"""name -> Measure, in the order of registration"""


def register_measure(
    *,
    of: type,
    name: str | None = None,
    label: str | None = None,
    definition: str | None = None,
    unit: str = "",
    shown: bool = False,
    compared: bool = False,
    unusual: bool = False,
    discrete: bool = False,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorator that adds a function of `HeadSums` -> (h,) or of `HeadSpectrum` -> float to the measures.

    name        default: the name of the function
    label       default: the name with spaces
    definition  "formula: meaning"; default: the docstring of the function
    discrete    a mean of it says nothing, as of positions; it can be neither compared nor unusual
    """

    def add(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        key = name or compute.__name__
        formula, _, meaning = " ".join((definition or compute.__doc__ or "").split()).partition(": ")
        if key in MEASURES:
            raise InputError(f"register_measure: there is a measure {key!r} already; choose another name")
        if not meaning:
            raise InputError(f"register_measure: {key!r} needs a docstring 'formula: meaning'")
        if discrete and (compared or unusual):
            raise InputError(
                f"register_measure: {key!r} is discrete, so it has no mean to compare; leave one of them out"
            )
        words = label or key.replace("_", " ")
        MEASURES[key] = Measure(key, words, formula, meaning, unit, shown, compared, unusual, discrete, of, compute)
        return compute

    return add


def evaluate(x: HeadSums | HeadProjection | TokenWeights | DelimiterWeights | RepeatedTokenScores) -> dict[str, Tensor]:
    """name -> (h,) float64 for every measure of this type."""
    # cloned: a view of one number would keep the whole array it was taken from
    return {name: m.compute(x).double().clone() for name, m in MEASURES.items() if m.of is type(x)}


def evaluate_spectra(heads: list[HeadSpectrum]) -> dict[str, Tensor]:
    """name -> (h,) float64 for every spectral measure."""
    spectral = {name: m.compute for name, m in MEASURES.items() if m.of is HeadSpectrum}
    return {name: torch.tensor([f(head) for head in heads], dtype=torch.float64) for name, f in spectral.items()}


def measures_table() -> str:
    """The Markdown table of all measures in docs/reference/report-json.md."""
    rows = [f"| `{m.name}` | {m.formula} | {m.unit} | {m.meaning} |" for m in MEASURES.values()]
    return "\n".join(["| measure | definition | unit | meaning |", "|---|---|---|---|", *rows])


# ---- spectrum ----


@register_measure(of=HeadSpectrum, unit="directions", shown=True, compared=True, unusual=True)
def effective_rank(x: HeadSpectrum) -> float:
    """exp(−Σ_i p_i log p_i), p_i = σ_i / Σ σ: how many directions P uses, 1 for a head that averages and n for a shift
    (Roy & Vetterli 2007); an estimate beyond 1536 tokens, see effective_rank_error."""
    return x.effective_rank.value


@register_measure(of=HeadSpectrum, unit="directions")
def effective_rank_error(x: HeadSpectrum) -> float:
    """standard error + bound of the bias: error of the estimated effective rank on a text; 0 up to 1536 tokens, where
    it is exact."""
    return x.effective_rank.error


@register_measure(of=HeadSpectrum, unit="directions")
def stable_rank(x: HeadSpectrum) -> float:
    """‖P‖²_F / σ_1²: a rank that small singular values hardly change."""
    return ranks.stable_rank(x.spectrum).item()


@register_measure(of=HeadSpectrum, unit="directions")
def numeric_rank(x: HeadSpectrum) -> float:
    """number of σ_i > 10⁻³ σ_1: the rank to three digits; an estimate where it is above 256 and the text has more than
    1536 tokens, see numeric_rank_error."""
    return x.numeric_rank.value


@register_measure(of=HeadSpectrum, unit="directions")
def numeric_rank_error(x: HeadSpectrum) -> float:
    """standard error + bound of the bias: error of the estimated numeric rank on a text; 0 where it was counted."""
    return x.numeric_rank.error


@register_measure(of=HeadSpectrum)
def sigma_1(x: HeadSpectrum) -> float:
    """σ_1: the largest singular value, 1 for a head that averages or shifts, up to √n for a sink."""
    return x.values[0].item()


@register_measure(of=HeadSpectrum, unit="share")
def sigma_ratio(x: HeadSpectrum) -> float:
    """σ_2 / σ_1: how much is left beside the leading direction."""
    return (x.values[1] / x.values[0].clamp(min=1e-300)).item() if len(x.values) > 1 else 0.0


def _energy(x: HeadSpectrum, r: int) -> float:
    return 1.0 if r >= x.spectrum.count else ranks.energy(x.spectrum)[r - 1].item()


def _output_error(x: HeadSpectrum, r: int) -> float:
    if r >= x.spectrum.count:
        return 0.0
    # summed from the small end if all values are known: no cancellation where the error is small
    remaining = x.output_shares[r:].sum().item() if x.spectrum.exact else 1 - x.output_shares[:r].sum().item()
    return math.sqrt(max(0.0, remaining))


for _r in (8, 16, 32, 64, 128, 256):
    register_measure(
        of=HeadSpectrum,
        name=f"energy_{_r}",
        label=f"energy at rank {_r}",
        definition=f"Σ_(i ≤ {_r}) σ_i² / ‖P‖²_F: share of ‖P‖² that the best matrix of rank {_r} keeps; misleading "
        "where a sink dominates P.",
        unit="share",
    )(lambda x, r=_r: _energy(x, r))
    register_measure(
        of=HeadSpectrum,
        name=f"output_error_{_r}",
        label=f"output error at rank {_r}",
        definition=f"‖(P − P_{_r}) V‖ / ‖P V‖: error of the output if P is replaced by its best rank-{_r} matrix; root "
        "mean square over all best ones where singular values are equal.",
        unit="share",
        shown=_r in (16, 64),
        compared=_r == 64,
        unusual=_r == 64,
    )(lambda x, r=_r: _output_error(x, r))


# ---- sharpness ----


@register_measure(of=HeadSums, unit="nats", shown=True, compared=True)
def entropy(x: HeadSums) -> Tensor:
    """mean_i H_i: how widely a query spreads its attention; exp(H) is the number of keys of an equal spread."""
    return x.entropy.mean(-1)


for _name, _q in (("min", 0.0), ("q10", 0.1), ("median", 0.5), ("q90", 0.9)):
    _definition = f"quantile {_q:g} of H_i over i: {_q:.0%} of the queries are sharper."
    register_measure(of=HeadSums, name=f"entropy_{_name}", definition=_definition, unit="nats")(
        lambda x, q=_q: x.ranked_entropy((x.m - 1) // 2 if q == 0.5 else round(q * (x.m - 1)))
    )


@register_measure(of=HeadSums, label="entropy, share of the largest possible", unit="share", shown=True, unusual=True)
def entropy_share(x: HeadSums) -> Tensor:
    """mean_i H_i / log(keys that query i may attend to): 0 attends to a single key, 1 averages over all keys."""
    uniform = x.visible.clamp(min=1).log()
    return torch.where(uniform > 0, x.entropy / uniform.clamp(min=1e-9), torch.ones(())).mean(-1)


@register_measure(of=HeadSums, unit="nats")
def distance_to_uniform(x: HeadSums) -> Tensor:
    """mean_i log(keys that query i may attend to) − H_i: Kullback–Leibler divergence from the average of all keys."""
    return (x.visible.clamp(min=1).log() - x.entropy).clamp(min=0).mean(-1)


@register_measure(of=HeadSums, shown=True)
def largest_score(x: HeadSums) -> Tensor:
    """max_ij S_ij: the largest score before the softmax."""
    return x.largest_score


@register_measure(of=HeadSums, unit="share")
def row_maximum(x: HeadSums) -> Tensor:
    """mean_i max_j P_ij: the weight of the most attended key, on average over queries."""
    return x.row_maximum.mean(-1)


@register_measure(of=HeadSums)
def frobenius(x: HeadSums) -> Tensor:
    """‖P‖_F: 1 for a head that averages, √n for one whose queries attend to single keys."""
    return x.frobenius_squared.sqrt()


# ---- sinks ----


@register_measure(of=HeadSums, label="largest share on one key", unit="share", shown=True, compared=True, unusual=True)
def sink_mass(x: HeadSums) -> Tensor:
    """max_j c_j: share of all attention that goes to the most attended key."""
    return x.received.amax(-1)


@register_measure(of=HeadSums, unit="position", discrete=True)
def sink_position(x: HeadSums) -> Tensor:
    """argmax_j c_j: position of the most attended key."""
    return x.received.argmax(-1)


@register_measure(of=HeadSums, unit="share")
def first_mass(x: HeadSums) -> Tensor:
    """c_0: share of all attention that goes to the first key."""
    return x.received[:, 0]


# ---- position ----

for _name, _offset, _key in (
    ("diagonal", 0, "the query's own position"),
    ("previous", -1, "the previous token"),
    ("next", 1, "the next token"),
):
    register_measure(of=HeadSums, name=f"{_name}_mass", definition=f"w({_offset}): weight of {_key}.", unit="share")(
        lambda x, offset=_offset: x.mass_at(offset)
    )

for _w in (1, 4, 16, 64):
    register_measure(
        of=HeadSums,
        name=f"mass_within_{_w}",
        label=f"weight within ±{_w}",
        definition=f"Σ_(−{_w} ≤ δ ≤ {_w}) w(δ): weight of keys at most {_w} token{'s' * (_w > 1)} away.",
        unit="share",
        shown=_w == 16,
        compared=_w == 16,
        unusual=_w == 16,
    )(lambda x, w=_w: x.mass_within(w))


@register_measure(of=HeadSums, unit="tokens")
def offset_mean(x: HeadSums) -> Tensor:
    """Σ_δ δ w(δ): mean offset from the query to the keys it attends to; negative is before it."""
    return x.offset_mass @ x.offsets


@register_measure(of=HeadSums, unit="tokens")
def offset_spread(x: HeadSums) -> Tensor:
    """(Σ_δ δ² w(δ) − offset_mean²)^½: standard deviation of that offset."""
    return (x.offset_mass @ x.offsets.square() - offset_mean(x).square()).clamp(min=0).sqrt()


@register_measure(of=HeadSums, unit="tokens", discrete=True)
def best_offset(x: HeadSums) -> Tensor:
    """δ* = argmin_δ min_a ‖P − a shift(δ)‖: the offset of the shift that is closest to P."""
    return x.offsets[x.diagonal_energy.argmax(-1)]


@register_measure(of=HeadSums, label="weight on the best offset", unit="share", shown=True, unusual=True)
def best_offset_mass(x: HeadSums) -> Tensor:
    """w(δ*): weight of the one offset that describes the head best."""
    return x.offset_mass.gather(-1, x.diagonal_energy.argmax(-1, keepdim=True)).squeeze(-1)


@register_measure(of=HeadSums, unit="share")
def best_offset_error(x: HeadSums) -> Tensor:
    """min_a ‖P − a shift(δ*)‖ / ‖P‖: distance from the best multiple of one shift."""
    return (1 - x.diagonal_energy.amax(-1) / x.frobenius_squared).clamp(min=0).sqrt()


@register_measure(of=HeadSums, label="error of the best Toeplitz matrix", unit="share", shown=True, compared=True)
def toeplitz_error(x: HeadSums) -> Tensor:
    """min_T ‖P − T‖ / ‖P‖ over Toeplitz T: distance from attention that depends on j − i alone."""
    return (1 - x.diagonal_energy.sum(-1) / x.frobenius_squared).clamp(min=0).sqrt()  # T has the diagonal means of P


@register_measure(of=HeadSums, label="weight farther than n/4", unit="share", shown=True, compared=True)
def distant_mass(x: HeadSums) -> Tensor:
    """Σ_(|δ| > n/4) w(δ): weight of keys more than a quarter of the text away."""
    far = x.n // 4  # slices: to choose by a condition takes longer than all other sums over offsets
    return x.offset_mass[:, : max(0, x.last - far)].sum(-1) + x.offset_mass[:, x.last + far + 1 :].sum(-1)


@register_measure(of=HeadSums, label="weight farther than n/4, by chance", unit="share")
def distant_chance(x: HeadSums) -> Tensor:
    """distant_mass of an average: over all keys, or all earlier ones if no weight is on later keys; 56 % or 40 % of a
    long text."""
    i, far = torch.arange(x.m, dtype=torch.float64), math.floor(x.n / 4)
    before, after = (i - far).clamp(0, x.n), (x.n - 1 - i - far).clamp(min=0)
    return torch.where(_looks_ahead(x), ((before + after) / x.n).mean(), (before / (i + 1)).mean())


@register_measure(of=HeadSums, label="share of the keys that the mask shows", unit="share")
def visible_share(x: HeadSums) -> Tensor:
    """mean_i (keys that query i may attend to) / (all keys, or all earlier ones if no weight is on later keys): less
    than 1 if a mask shows a window."""
    reach = torch.where(_looks_ahead(x).unsqueeze(-1), x.n, torch.arange(x.m) + 1)
    return (x.visible.double() / reach).clamp(max=1).mean(-1)


def _looks_ahead(x: HeadSums) -> Tensor:
    """(h,) whether some weight is on keys after the query, or lengths differ, so that there is no before and after."""
    return (x.offset_mass[:, x.last + 1 :].sum(-1) > 0) | (x.m != x.n)


# ---- tokens ----

for _name, _where, _meaning in (
    ("duplicate", "j ≠ i, t_j = t_i", "other places of its own token"),
    ("induction", "j ≤ i, t_(j−1) = t_i", "what followed its token earlier"),
    ("previous_of_duplicate", "j < i − 1, t_(j+1) = t_i", "what preceded its token earlier"),
):
    _words = f"{_meaning}, over the queries that have such a key"
    register_measure(
        of=TokenWeights,
        name=f"{_name}_mass",
        label=f"weight on {_meaning}",
        definition=f"mean_i Σ_j P_ij, {_where}: weight of {_words}.",
        unit="share",
    )(lambda x, name=_name: x.mass[name])
    register_measure(
        of=TokenWeights,
        name=f"{_name}_chance",
        label=f"weight on {_meaning}, by chance",
        definition=f"{_name}_mass of a head that averages: the share of {_words}, among the visible keys.",
        unit="share",
    )(lambda x, name=_name: x.chance[name])
    register_measure(
        of=RepeatedTokenScores,
        name=f"{_name}_score",
        label=f"{_name.replace('_', ' ')} score, on repeated random tokens",
        definition=f"{_name}_mass on random tokens repeated twice, over the second half: 1 for a head that attends to "
        f"{_meaning}, close to 0 for one that averages; one measurement is one such sequence.",
        unit="share",
        shown=_name != "previous_of_duplicate",
    )(lambda x, name=_name: x.score[name])


@register_measure(of=DelimiterWeights, label="weight on delimiters", unit="share", shown=True)
def delimiter_mass(x: DelimiterWeights) -> Tensor:
    """Σ_j c_j, t_j a delimiter: weight of punctuation, newlines and special tokens."""
    return x.mass


@register_measure(of=DelimiterWeights, label="weight on delimiters, by chance", unit="share")
def delimiter_chance(x: DelimiterWeights) -> Tensor:
    """delimiter_mass of a head that averages: the share of delimiters among the visible keys."""
    return x.chance


# ---- output ----


@register_measure(of=HeadSums)
def output_norm(x: HeadSums) -> Tensor:
    """‖P V‖_F: size of the head's output."""
    return torch.linalg.matrix_norm(x.output)


@register_measure(of=HeadSums)
def value_norm(x: HeadSums) -> Tensor:
    """‖V‖_F: size of the head's values."""
    return torch.linalg.matrix_norm(x.values)


@register_measure(of=HeadProjection, label="norm added to the residual stream", shown=True, compared=True)
def contribution(x: HeadProjection) -> Tensor:
    """‖P V W_O‖_F: what the head adds to the residual stream."""
    # <O^T O, W W^T>: two d x d matrices instead of one as long as the text
    return (x.output_gram * (x.weight @ x.weight.mT)).sum((-2, -1)).clamp(min=0).sqrt()


@register_measure(of=HeadImportance, unit="nats, or share", shown=True, compared=True)
def importance(x: HeadImportance) -> Tensor:
    """mean_i KL(p_i ‖ p′_i), or mean_i ‖a_i − a′_i‖ / ‖a_i‖ without logits: change of the model's answer if the head's
    output is replaced by its mean over tokens; only with `--importance`."""
    return x.change
