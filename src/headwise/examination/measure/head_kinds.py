"""The kind of a head on one text: a name, and the measures that decided.

The first rule that fits decides, from the most specific to the least specific:

    uniform      entropy at least 97 % of the largest possible
    positional   half of the mass on one offset, or a Toeplitz error of at most 35 %
    sink         at least 30 % of all attention goes to one key
    local        at least half of the mass within 16 tokens
    low rank     rank n/8 (at most 64) reproduces the output within 5 %
    broad        entropy at least 75 % of the largest possible
    dense        none of these: sharp, near and far, of high rank

The last three need the output error, which is measured on texts with a spectrum only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headwise.examination.record import Mode

UNIFORM_ENTROPY = 0.97
TOEPLITZ_ERROR = 0.35
OFFSET_MASS = 0.5
SINK_MASS = 0.3
LOCAL_MASS = 0.5
LOW_RANK_ERROR = 0.05
BROAD_ENTROPY = 0.75

KINDS = {
    "uniform": "averages almost evenly",
    "positional": "attends to fixed offsets",
    "sink": "attends mostly to one token",
    "local": "attends to nearby tokens",
    "low rank": "a low rank reproduces its output",
    "broad": "spreads widely",
    "dense": "attends near and far, by content",
}


NEED_SPECTRUM = ("low rank", "broad", "dense")
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
    share, error_name = x["entropy_share"], f"output_error_{low_rank(n)}"
    if share >= UNIFORM_ENTROPY:
        return HeadKind("uniform", ("entropy_share",))
    if x["best_offset_mass"] >= OFFSET_MASS:
        return HeadKind("positional", ("best_offset_mass", "best_offset"))
    if x["toeplitz_error"] <= TOEPLITZ_ERROR:
        return HeadKind("positional", ("toeplitz_error",))
    if x["sink_mass"] >= SINK_MASS:
        return HeadKind("sink", ("sink_mass", "sink_position"))
    if x["mass_within_16"] >= LOCAL_MASS:
        return HeadKind("local", ("mass_within_16",))
    if ignore_rank:
        return HeadKind("broad" if share >= BROAD_ENTROPY else "dense", ("entropy_share",))
    if error_name not in x:
        return None
    if x[error_name] <= LOW_RANK_ERROR:
        return HeadKind("low rank", (error_name,))
    return HeadKind("broad" if share >= BROAD_ENTROPY else "dense", ("entropy_share", error_name))


def describe(kind: HeadKind, x: Mapping[str, float], modes: Mapping[str, Mode]) -> str:
    """The kind in one sentence, from the means over texts of its evidence, and the most frequent positions."""
    first, last = kind.evidence[0], kind.evidence[-1]
    value, rank = x[first], last.removeprefix("output_error_")
    if kind.name == "uniform":
        return f"averages almost evenly ({value:.0%} of the largest possible entropy)"
    if first == "best_offset_mass":
        return f"attends to {_place(modes['best_offset'], 'one offset', _offset, f' ({value:.0%} of its weight)')}"
    if kind.name == "positional":
        return f"depends on the offset alone, within {value:.0%}"
    if kind.name == "sink":
        return f"{value:.0%} of its attention goes to {_place(modes['sink_position'], 'one token', 'token {}'.format)}"
    if kind.name == "local":
        return f"attends within 16 tokens ({value:.0%} of its weight)"
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
