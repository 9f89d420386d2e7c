"""What a head is, in one word and one sentence, with the numbers that made it so.

The first rule that fits decides; the order goes from the most to the least that is known about P:

    uniform      it averages: entropy above 97 % of the largest possible
    positional   offsets whatever the content: half the mass on one offset, or a Toeplitz error below 35 %
    sink         at least 30 % of all attention goes to one key
    local        at least half of the mass within 16 tokens
    low rank     its output survives a rank of n/8 (at most 64) with at most 5 % error
    broad        entropy above 75 % of the largest possible
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

KINDS = ("uniform", "positional", "sink", "local", "low rank", "broad", "dense")


@dataclass(frozen=True)
class Kind:
    """A kind with the numbers that decided it and the sentence a reader sees."""

    name: str
    because: Mapping[str, float]
    words: str


def kind_of(x: Mapping[str, float], n: int) -> Kind:
    """The first rule that fits the numbers of one head on a text of n keys; ranks may be missing."""
    share, toeplitz, offset = x["entropy_share"], x["toeplitz_error"], x["best_offset"]
    if share >= UNIFORM_ENTROPY:
        return Kind("uniform", {"entropy_share": share}, f"averages almost evenly ({share:.0%} of the largest entropy)")
    if x["best_offset_mass"] >= OFFSET_MASS:
        mass = x["best_offset_mass"]
        return Kind("positional", {"best_offset_mass": mass}, f"looks at {_offset(offset)} ({mass:.0%} of its mass)")
    if toeplitz <= TOEPLITZ_ERROR:
        words = f"depends on the distance alone, to {toeplitz:.0%}"
        return Kind("positional", {"toeplitz_error": toeplitz}, words)
    if x["sink_mass"] >= SINK_MASS:
        where = int(x["sink_position"])
        words = f"parks {x['sink_mass']:.0%} of its attention on token {where}"
        return Kind("sink", {"sink_mass": x["sink_mass"], "sink_position": where}, words)
    if x["mass_within_16"] >= LOCAL_MASS:
        words = f"stays within 16 tokens ({x['mass_within_16']:.0%} of its mass)"
        return Kind("local", {"mass_within_16": x["mass_within_16"]}, words)
    r = rank_for(n)
    error = x.get(f"output_error_{r}")
    if error is not None and error <= LOW_RANK_ERROR:
        words = f"a rank of {r} keeps its output to {error:.1%}"
        return Kind("low rank", {f"output_error_{r}": error}, words)
    if share >= BROAD_ENTROPY:
        return Kind("broad", {"entropy_share": share}, f"spreads widely ({share:.0%} of the largest entropy)")
    because = {"entropy_share": share} | ({} if error is None else {f"output_error_{r}": error})
    rank = "" if error is None else f"; rank {r} would lose {error:.0%} of its output"
    return Kind("dense", because, f"chooses tokens near and far by their content{rank}")


def rank_for(n: int) -> int:
    """The largest of 8, 16, 32, 64 that is at most n / 8: what counts as low for a text of n tokens."""
    return max((r for r in (8, 16, 32, 64) if r <= n / 8), default=8)


def _offset(offset: float) -> str:
    names = {0: "itself", -1: "the previous token", 1: "the next token"}
    return names.get(int(offset), f"the token {abs(int(offset))} {'before' if offset < 0 else 'after'}")
