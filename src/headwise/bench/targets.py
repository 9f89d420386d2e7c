"""What was asked of each operator's speed, beside what is reached here: ratios in one run, and fitted exponents.

A row is a ratio (time of the slower) / (time of the faster), forward and forward with backward; met if it is at least
what was asked.  Exponents are read from what `bench scaling` has measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

from headwise.bench.peers import HEADS, WIDTH
from headwise.bench.races import SQUARE, Race, Result
from headwise.bench.scaling import Scaling

LINEAR = ("layer: linear-attention-transformer", "layer: performer-pytorch")
LINFORMERS = ("layer: linformer", "layer: linformer-pytorch")
BOTH_WAYS = ("strided, both ways", "fixed, both ways")
LENGTHS = (1024, 4096, 16384)
RACES = (
    Race("linear cost", 16384, ("layer: exact", "layer: efficient", "layer: factored pooling", *LINEAR)),
    Race("window", 16384, ("attention: exact, masked", "attention: window 128")),
    *(
        Race("patterns", n, ("attention: exact, causal", "attention: strided", "attention: fixed"))
        for n in (4096, 16384)
    ),
    *(Race("patterns, both ways", n, tuple(f"attention: {x}" for x in ("exact", *BOTH_WAYS))) for n in (4096, 16384)),
    *(Race("hashed", n, ("attention: exact", "attention: hashed")) for n in (4096, 16384)),
    *(Race("reformer", n, ("layer: hashed", "layer: reformer-pytorch")) for n in LENGTHS),
    *(Race("projected", n, ("layer: projected 256", "layer: shortened 256", *LINFORMERS)) for n in LENGTHS),
    Race("roof", 16384, ("product: square", "product: two", "attention: factored identity")),
)


@final
@dataclass(frozen=True)
class Row:
    """`asked` and `reached` are ratios or exponents; None where nothing was asked, or a package is not installed."""

    what: str
    n: int | None
    asked: str
    forward: float | None
    both: float | None
    met: bool | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@final
@dataclass(frozen=True)
class Target:
    """The fast one is at least `forward` and `both` times as fast as the slow one, in one race."""

    race: str
    slow: str
    fast: str
    forward: float
    both: float

    def row(self, race: Race, result: Result) -> Row:
        asked = f">= {self.forward:g} and {self.both:g}" if self.forward != self.both else f">= {self.forward:g}"
        asked = "> 1" if self.forward == self.both == 1 else asked
        what = f"{self.fast} against {self.slow.split(': ')[1]}"
        if self.slow not in result or self.fast not in result:
            return Row(what, race.n, asked, None, None, None)
        forward = result[self.slow].forward.over(result[self.fast].forward)
        both = result[self.slow].both.over(result[self.fast].both)
        return Row(what, race.n, asked, forward, both, forward >= self.forward and both >= self.both)


def targets(race: Race) -> Iterator[Target]:
    """What is asked of the runners of a race."""
    patterns = 3.0 if race.n < 16384 else 10.0
    if race.name == "linear cost":
        for ours in race.runners[1:3]:
            yield Target(race.name, race.runners[0], ours, 12.0, 15.0)
            yield from (Target(race.name, peer, ours, 1.0, 1.0) for peer in LINEAR)
    elif race.name == "projected":
        for ours in race.runners[:2]:
            yield from (Target(race.name, peer, ours, 1.0, 1.0) for peer in LINFORMERS)
    elif race.name == "reformer":
        yield Target(race.name, race.runners[1], race.runners[0], 2.0, 2.0)
    elif race.name != "roof":
        least = {"window": 10.0, "hashed": 1.0}.get(race.name, patterns)
        yield from (Target(race.name, race.runners[0], ours, least, least) for ours in race.runners[1:])


def rows(results: Mapping[str, Result], races: Sequence[Race] = RACES) -> list[Row]:
    """Every target of the races that were run."""
    found = [target.row(race, results[race.key]) for race in races if race.key in results for target in targets(race)]
    return found + [row for race in races if race.name == "roof" and race.key in results for row in roof(race, results)]


def roof(race: Race, results: Mapping[str, Result]) -> list[Row]:
    """(time that the operations of the double softmax would take at the machine's best rate) / (the time it takes).

    Two products forward, six with backward; the softmaxes count as no operations at all.
    """
    result, k = results[race.key], WIDTH // HEADS
    square, two, ours = (result[name] for name in race.runners)
    work = 2 * 2 * HEADS * race.n * k * k
    rate = 2 * SQUARE**3 / square.forward.median
    forward, both = work / rate / ours.forward.median, 3 * work / rate / ours.both.median
    shaped = two.forward.over(ours.forward)
    name = f"double softmax of the best matrix product, {rate / 1e9:.0f} GFLOP/s"
    return [
        Row(name, race.n, ">= 0.5", forward, both, min(forward, both) >= 0.5),
        Row("double softmax of its own two products alone", race.n, ">= 0.5", shaped, None, shaped >= 0.5),
    ]


EXPONENTS = {
    "exact": (2.0, 0.15),
    "strided": (1.5, 0.15),
    "fixed": (1.5, 0.15),
    "hashed": (-math.inf, 1.2),
    **dict.fromkeys(
        ("window 128", "projected 256", "efficient", "factored pooling", "factored CountSketch", "factored dense"),
        (1.0, 0.1),
    ),
}


def exponent_rows(scaling: Scaling) -> list[Row]:
    """Fitted exponents of time, and of memory where it is to be linear."""
    found = []
    for name, (middle, slack) in EXPONENTS.items():
        if name not in scaling.names():
            continue
        forward, both = (scaling.exponent(name, what).value for what in ("forward", "both"))
        if math.isinf(middle):
            met, asked = max(forward, both) <= slack, f"<= {slack:g}"
        else:
            met, asked = max(abs(forward - middle), abs(both - middle)) <= slack, f"{middle:g} ± {slack:g}"
        found.append(Row(f"exponent of time, {name}", None, asked, forward, both, met))
    for name in ("efficient", "factored pooling"):
        if name in scaling.names():
            forward, both = (scaling.exponent(name, what).value for what in ("forward_mb", "both_mb"))
            found.append(Row(f"exponent of memory, {name}", None, "1", forward, both, max(forward, both) <= 1.1))
    return found
