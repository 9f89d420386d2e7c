"""The kind of a head: a name and a description, with the measures that decided.

The first rule that fits decides, from the most specific to the least specific:

    uniform      entropy at least 97 % of the largest possible
    positional   half of the mass on one offset, or a Toeplitz error of at most 35 %
    sink         at least 30 % of all attention goes to one key
    local        at least half of the mass within 16 tokens
    low rank     rank n/8 (at most 64) reproduces the output within 5 %
    broad        entropy at least 75 % of the largest possible
    dense        none of these: sharp, near and far, of high rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class HeadKind:
    """A kind, its description for the reader, and the measures that decided."""

    name: str
    description: str
    evidence: Mapping[str, float]


def kind_of(x: Mapping[str, float], n: int) -> HeadKind:
    """The first rule that fits the measures of one head on a text of n keys; spectral measures may be missing."""

    def kind(name: str, description: str, *measures: str) -> HeadKind:
        return HeadKind(name, description, {measure: x[measure] for measure in measures if measure in x})

    share, offset_mass, within = x["entropy_share"], x["best_offset_mass"], x["mass_within_16"]
    if share >= UNIFORM_ENTROPY:
        return kind("uniform", f"averages almost evenly ({share:.0%} of the largest possible entropy)", "entropy_share")
    if offset_mass >= OFFSET_MASS:
        where = _offset(int(x["best_offset"]))
        return kind("positional", f"attends to {where} ({offset_mass:.0%} of its weight)", "best_offset_mass")
    if x["toeplitz_error"] <= TOEPLITZ_ERROR:
        error = x["toeplitz_error"]
        return kind("positional", f"depends on the offset alone, within {error:.0%}", "toeplitz_error")
    if x["sink_mass"] >= SINK_MASS:
        sink = f"{x['sink_mass']:.0%} of its attention goes to token {int(x['sink_position'])}"
        return kind("sink", sink, "sink_mass", "sink_position")
    if within >= LOCAL_MASS:
        return kind("local", f"attends within 16 tokens ({within:.0%} of its weight)", "mass_within_16")
    rank = low_rank(n)
    error_name = f"output_error_{rank}"
    error = x.get(error_name)
    if error is not None and error <= LOW_RANK_ERROR:
        return kind("low rank", f"rank {rank} reproduces its output within {100 * error:.1f} %", error_name)
    if share >= BROAD_ENTROPY:
        return kind("broad", f"spreads widely ({share:.0%} of the largest possible entropy)", "entropy_share")
    loss = "" if error is None else f"; rank {rank} would lose {error:.0%} of its output"
    return kind("dense", f"attends near and far, by content{loss}", "entropy_share", error_name)


def low_rank(n: int) -> int:
    """The largest of 8, 16, 32, 64 that is at most n / 8: what counts as low for a text of n tokens."""
    return max((r for r in (8, 16, 32, 64) if r <= n / 8), default=8)


def _offset(offset: int) -> str:
    names = {0: "its own position", -1: "the previous token", 1: "the next token"}
    return names.get(offset, f"the token {abs(offset)} positions {'before' if offset < 0 else 'after'}")
