"""Layers and attentions timed in turns in one process, by name: what the targets are ratios of.

    "layer: NAME"      a layer of width 512 with 8 heads, ours or a peer's, its linear maps included
    "attention: NAME"  the operator alone on 8 heads of 64, built anew in every call; also, by torch's own call,
                       "exact", "exact, causal" and "exact, masked" (to the band that window 128 sees)
    "product: square"  a product of two square matrices of SQUARE rows, the best that the machine's matrix product does
    "product: two"     the two products of the double softmax alone, (L^T v) and H (L^T v), into memory that is there

Race by race the times go to a file, so that a long list can be run in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bench.cases import ENTRIES
from headwise.bench.clock import Timing, in_turns
from headwise.bench.peers import HEADS, OURS, PEERS, WIDTH, backward_of, forward_of, ours
from headwise.operators import factored, fixed, strided
from headwise.operators.linear.projections import identity

Call = Callable[[], object]
SQUARE = 2048


@final
@dataclass(frozen=True)
class Race:
    """Who runs against whom, at which length."""

    name: str
    n: int
    runners: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name} at {self.n}"


@final
@dataclass(frozen=True)
class Times:
    forward: Timing
    both: Timing


Result = dict[str, Times]


def run(race: Race, *, rounds: int = 5, seconds: float = 30.0) -> Result:
    """Every runner that is installed, forward in turns, then forward and backward in turns."""
    torch.manual_seed(0)
    made = {name: found for name in race.runners if (found := runner(name, race.n)) is not None}
    forward = in_turns({name: calls[0] for name, calls in made.items()}, rounds=rounds, seconds=seconds)
    both = in_turns({name: calls[1] for name, calls in made.items()}, rounds=rounds, seconds=2 * seconds)
    return {name: Times(forward[name], both[name]) for name in made}


def runner(name: str, n: int) -> tuple[Call, Call] | None:
    """The two calls, or None for a package that is not installed."""
    kind, _, what = name.partition(": ")
    return {"layer": _layer, "attention": _attention, "product": _product}[kind](what, n)


def _layer(name: str, n: int) -> tuple[Call, Call] | None:
    x = torch.randn(1, n, WIDTH, requires_grad=True)
    if name in OURS:
        layer = ours(name, n)
    else:
        peer = next(peer for peer in PEERS if peer.name == name)
        if not peer.present:
            return None
        layer = peer.make(n)
    return forward_of(layer, x), backward_of(layer, x)


def _attention(name: str, n: int) -> tuple[Call, Call]:
    q, k, v = (torch.randn(1, n, HEADS, WIDTH // HEADS).transpose(1, 2).requires_grad_() for _ in range(3))
    pull = torch.randn_like(v)
    call = _call(name, n)

    def forward() -> None:
        with torch.no_grad():
            call(q, k, v)

    return forward, lambda: torch.autograd.grad(call(q, k, v), (q, k, v), pull)


def _product(name: str, n: int) -> tuple[Call, Call]:
    if name == "square":
        a, b, room = torch.randn(3, SQUARE, SQUARE).unbind(0)
        call = partial(torch.mm, a, b, out=room)
        return call, call
    q, k, v, out = (torch.randn(n, HEADS, WIDTH // HEADS).transpose(0, 1) for _ in range(4))
    means = torch.empty(HEADS, WIDTH // HEADS, WIDTH // HEADS)

    def two() -> Tensor:
        return torch.bmm(q, torch.bmm(k.mT, v, out=means), out=out)

    return two, two


def _call(name: str, n: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == "exact, masked":
        away = torch.arange(n) - torch.arange(n).unsqueeze(-1)
        return partial(F.scaled_dot_product_attention, attn_mask=(away >= -64) & (away < 64))
    if name in ("exact", "exact, causal"):
        return partial(F.scaled_dot_product_attention, is_causal=name != "exact")
    others = {
        "strided, both ways": strided,
        "fixed, both ways": fixed,
        "factored identity": partial(factored, e=identity(n)),
    }
    build = others[name] if name in others else ENTRIES[name].build(n)
    return lambda q, k, v: build(q, k)(v)


def load(store: Path) -> dict[str, Result]:
    """What earlier runs left, by race; a last line cut off by an interruption is left out."""
    found: dict[str, Result] = {}
    for line in store.read_text().splitlines() if store.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["race"]] = {
            name: Times(Timing(**x["forward"]), Timing(**x["both"])) for name, x in row["times"].items()
        }
    return found


def collect(
    races: Sequence[Race], store: Path, done: Callable[[int], None], *, rounds: int = 5, seconds: float = 30.0
) -> dict[str, Result]:
    """The results of all races; those that are in `store` are not run again."""
    known = load(store)
    for count, race in enumerate(races, start=1):
        if race.key not in known:
            known[race.key] = run(race, rounds=rounds, seconds=seconds)
            times = {name: asdict(x) for name, x in known[race.key].items()}
            whole = not store.exists() or store.read_text().endswith("\n") or not store.read_text()
            with store.open("a") as file:
                file.write(("" if whole else "\n") + json.dumps({"race": race.key, "times": times}) + "\n")
        done(count)
    return {race.key: known[race.key] for race in races}
