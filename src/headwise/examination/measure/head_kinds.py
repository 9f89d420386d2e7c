"""The kind of a head on one text, what else holds of it, and the measures that decided.

The first rule that fits gives the kind, from the most specific to the least specific; other rules that fit are traits:

    induction         40 % of the weight on what followed the query's token earlier
    duplicate token   40 % of the weight on other places of the query's token
    uniform           entropy at least 97 % of the largest possible, over more than a window
    positional        half of the weight on one offset, or a Toeplitz error of at most 35 %
    delimiter         half of the weight on delimiters, twice the chance level, and most of that not on one key
    sink              at least 30 % of all attention goes to one key
    local             half of the weight within 16 tokens, or an average over a window that the mask shows; either with
                      less than 75 % of the distant weight of an average over all keys
    retrieval         60 % of the weight on distant keys, 1.2 times the chance level, and half of it on one key a query
    broad             entropy at least 75 % of the largest possible
    low rank          rank n/8 (at most 64) reproduces the output within 5 %
    dense             none of these: sharp, near and far, of high rank

Weights on repeated tokens are those on random tokens repeated twice (`induction_score`) where these were measured, else
those above the chance level on the text.  Entropy is relative to the visible keys: a head whose mask shows it a window
averages evenly within that window, and is local.  The last two rules need the output error, which is measured on texts
with a spectrum only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headwise.examination.record import Mode

REPEATED_TOKEN_MASS = 0.4
UNIFORM_ENTROPY = 0.97
TOEPLITZ_ERROR = 0.35
OFFSET_MASS = 0.5
DELIMITER_MASS = 0.5
SINK_MASS = 0.3
LOCAL_MASS = 0.5
NEAR = 0.75
"""A head prefers near keys if its distant weight is below this multiple of the chance level."""
VISIBLE_SHARE = 0.75
DISTANT_MASS = 0.6
LOW_RANK_ERROR = 0.05
BROAD_ENTROPY = 0.75

KINDS = {
    "induction": "attends to what followed its token earlier",
    "duplicate token": "attends to other places of its token",
    "uniform": "averages almost evenly",
    "positional": "attends to fixed offsets",
    "delimiter": "attends to punctuation, newlines and special tokens",
    "sink": "attends mostly to one token",
    "local": "attends to nearby tokens",
    "retrieval": "picks single tokens far away",
    "broad": "spreads widely",
    "low rank": "a low rank reproduces its output",
    "dense": "attends near and far, by content",
}

TRAITS = {
    "previous token": "half of the weight on the previous token",
    "next token": "half of the weight on the next token",
    "own position": "half of the weight on the query's own position",
    "previous of duplicate": "attends to what preceded its token earlier",
    "near": "gives distant keys less than three quarters of the weight of an average",
}
"""What may hold of a head beside the kinds themselves, which are traits of heads of another kind."""

NEED_SPECTRUM = ("low rank", "dense")
"""Kinds that cannot be told apart without the output error."""


@dataclass(frozen=True)
class HeadKind:
    """A kind, and the names of the measures that decided: heads with the same ones were judged by the same rule."""

    name: str
    evidence: tuple[str, ...]


def kind_of(x: Mapping[str, float], n: int, *, ignore_rank: bool = False) -> HeadKind | None:
    """The first rule that fits the measures of one head on a text of n keys.

    None if no rule before "low rank" fits and the output error is not in `x`; `ignore_rank` leaves that rule out.
    """
    error_name = f"output_error_{low_rank(n)}"
    for name, rule in _RULES.items():
        if name == "low rank" and not ignore_rank and error_name not in x:
            return None
        evidence = () if name == "low rank" and ignore_rank else rule(x, n)
        if evidence:
            return HeadKind(name, evidence)
    return HeadKind("dense", ("entropy_share",) if ignore_rank else ("entropy_share", error_name))


def traits_of(x: Mapping[str, float], n: int) -> set[str]:
    """All rules that fit on a text of n keys, the one of the kind included, and the further traits."""
    traits = {name for name, rule in _RULES.items() if rule(x, n)}
    offsets = {-1: "previous token", 1: "next token", 0: "own position"}
    if x["best_offset_mass"] >= OFFSET_MASS and int(x["best_offset"]) in offsets:
        traits.add(offsets[int(x["best_offset"])])
    if _repeated_token(x, "previous_of_duplicate"):
        traits.add("previous of duplicate")
    if _is_near(x):
        traits.add("near")
    return traits - {follows for trait in traits for follows in _FOLLOWS.get(trait, ())}


_FOLLOWS = {"uniform": ("broad", "positional", "low rank"), "local": ("near",)}
"""What follows from a trait is not said beside it."""


def _repeated_token(x: Mapping[str, float], pattern: str) -> tuple[str, ...]:
    score = x.get(f"{pattern}_score", math.nan)
    if not math.isnan(score):
        return (f"{pattern}_score",) if score >= REPEATED_TOKEN_MASS else ()
    mass, chance = x.get(f"{pattern}_mass", math.nan), x.get(f"{pattern}_chance", math.nan)
    return (f"{pattern}_mass",) if mass - chance >= REPEATED_TOKEN_MASS else ()


def _uniform(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    return ("entropy_share",) if x["entropy_share"] >= UNIFORM_ENTROPY and not _is_window(x) else ()


def _positional(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    if x["best_offset_mass"] >= OFFSET_MASS:
        return ("best_offset_mass", "best_offset")
    # an even window is Toeplitz too, and local says more
    return ("toeplitz_error",) if x["toeplitz_error"] <= TOEPLITZ_ERROR and not _is_window(x) else ()


def _delimiter(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    mass, chance = x.get("delimiter_mass", math.nan), x.get("delimiter_chance", math.nan)
    fits = mass >= DELIMITER_MASS and mass >= 2 * chance and x["sink_mass"] < mass / 2
    return ("delimiter_mass",) if fits else ()


def _sink(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    return ("sink_mass", "sink_position") if x["sink_mass"] >= SINK_MASS else ()


def _local(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    if _is_window(x):
        return ("entropy_share", "visible_share")
    return ("mass_within_16",) if x["mass_within_16"] >= LOCAL_MASS and _is_near(x) else ()


def _retrieval(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    far = x["distant_mass"] >= max(DISTANT_MASS, 1.2 * x["distant_chance"])
    return ("distant_mass", "row_maximum") if far and x["row_maximum"] >= 0.5 and x["sink_mass"] < SINK_MASS else ()


def _broad(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    return ("entropy_share",) if x["entropy_share"] >= BROAD_ENTROPY and not _is_window(x) else ()


def _low_rank(x: Mapping[str, float], n: int) -> tuple[str, ...]:
    name = f"output_error_{low_rank(n)}"
    return (name,) if x.get(name, math.inf) <= LOW_RANK_ERROR else ()


def _is_near(x: Mapping[str, float]) -> bool:
    return x["distant_mass"] < NEAR * x["distant_chance"]


def _is_window(x: Mapping[str, float]) -> bool:
    """An average over near keys, because the mask shows no others."""
    return x["entropy_share"] >= UNIFORM_ENTROPY and x["visible_share"] < VISIBLE_SHARE and _is_near(x)


_RULES: dict[str, Callable[[Mapping[str, float], int], tuple[str, ...]]] = {
    "induction": lambda x, n: _repeated_token(x, "induction"),
    "duplicate token": lambda x, n: _repeated_token(x, "duplicate"),
    "uniform": _uniform,
    "positional": _positional,
    "delimiter": _delimiter,
    "sink": _sink,
    "local": _local,
    "retrieval": _retrieval,
    "broad": _broad,
    "low rank": _low_rank,
}
"""kind -> the measures by which a head has it, or nothing; in the order in which they are tried"""


def describe(kind: HeadKind, x: Mapping[str, float], modes: Mapping[str, Mode]) -> str:
    """The kind in one sentence, from the means over texts of its evidence, and the most frequent positions."""
    first, last = kind.evidence[0], kind.evidence[-1]
    value, rank = x[first], last.removeprefix("output_error_")
    if kind.name in ("induction", "duplicate token"):
        where = "random tokens repeated twice" if first.endswith("_score") else "tokens that occurred before"
        return f"{KINDS[kind.name]} ({value:.0%} of its weight on {where})"
    if kind.name == "uniform":
        return f"averages almost evenly ({value:.0%} of the largest possible entropy)"
    if first == "best_offset_mass":
        return f"attends to {_place(modes['best_offset'], 'one offset', _offset, f' ({value:.0%} of its weight)')}"
    if kind.name == "positional":
        return f"depends on the offset alone, within {value:.0%}"
    if kind.name == "delimiter":
        return f"attends to punctuation, newlines and special tokens ({value:.0%} of its weight)"
    if kind.name == "sink":
        return f"{value:.0%} of its attention goes to {_place(modes['sink_position'], 'one token', 'token {}'.format)}"
    if kind.name == "local":
        if first == "mass_within_16":
            return f"attends within 16 tokens ({value:.0%} of its weight)"
        return f"averages over the window that its mask shows, {x['visible_share']:.0%} of the keys"
    if kind.name == "retrieval":
        return f"picks single tokens far away ({value:.0%} of its weight farther than a quarter of the text)"
    if kind.name == "low rank":
        return f"rank {rank} reproduces its output within {100 * value:.1f} %"
    if kind.name == "broad":
        return f"spreads widely ({value:.0%} of the largest possible entropy)"
    loss = f"rank {rank} would lose {x[last]:.0%} of its output" if last != first else "its rank was not measured there"
    return f"attends near and far, by content; {loss}"


def low_rank(n: int) -> int:
    """The largest of 8, 16, 32, 64 that is at most n / 8: what counts as low for a text of n tokens."""
    return max((r for r in (8, 16, 32, 64) if r <= n / 8), default=8)


def _place(mode: Mode, unnamed: str, name: Callable[[int], str], weight: str = "") -> str:
    """A position on which the texts agree, or how many of them agree."""
    words = name(int(mode.value))
    if mode.count == mode.texts:
        return f"{words}{weight}"
    if mode.count == 1:
        return f"{unnamed}{weight}, a different one on each text"
    return f"{unnamed}{weight}, {words} on {mode.count} of {mode.texts} texts"


def _offset(offset: int) -> str:
    names = {0: "its own position", -1: "the previous token", 1: "the next token"}
    return names.get(offset, f"the token {abs(offset)} positions {'before' if offset < 0 else 'after'}")
