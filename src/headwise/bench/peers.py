"""The same layer by other packages, in the same run: width 512, 8 heads, one sequence, with and without backward.

Packages that are not installed are skipped; none is a dependency.  A layer is compared with ours of the same idea and
the same parameters (no bias but that of the output; E and F learned), linear maps included on both sides, so layers
differ less than their attention does.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.bench.cases import CASES, RANK
from headwise.bench.clock import PASSES, Call, Times, forward_and_backward, times_in_turns, timing
from headwise.bench.kept import Kept
from headwise.errors import InputError
from headwise.nn.builders import LearnedProjection
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.operators import projected
from headwise.random_state import seeded

WIDTH, HEADS, DIM_HEAD = 512, 8, 64


@final
@dataclass(frozen=True)
class Peer:
    """A layer of another package, and the operator it is compared with; `build(its class, n)` makes it."""

    name: str
    ours: str
    path: str  # package.module:class
    build: Callable[[Any, int], nn.Module]
    longest: int = 65536

    @property
    def package(self) -> str:
        """The package to install."""
        return re.split("[.:]", self.path)[0].replace("_", "-")

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package.replace("-", "_")) is not None

    def make(self, n: int) -> nn.Module:
        return self.build(resolve_name(self.path), n)


class _SelfAttention(nn.Module):
    """`call(layer, x)` as a module of x alone."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _torch(layer: Any, n: int) -> nn.Module:
    made = layer(WIDTH, HEADS, bias=False, batch_first=True)
    return _SelfAttention(made, lambda layer, x: layer(x, x, x, need_weights=False)[0])


def _x_transformers(layer: Any, n: int) -> nn.Module:
    made = layer(WIDTH, dim_head=DIM_HEAD, heads=HEADS, flash=True)
    return _SelfAttention(made, lambda layer, x: out[0] if isinstance(out := layer(x), tuple) else out)


def _linformer_pytorch(layer: Any, n: int) -> nn.Module:
    get_ef = resolve_name("linformer_pytorch.linformer_pytorch:get_EF")
    e, f = get_ef(n, RANK), get_ef(n, RANK)
    return layer(n, DIM_HEAD, WIDTH, RANK, HEADS, 0.0, "C0", "layerwise", e, f, False, None)


def _nystrom(layer: Any, n: int) -> nn.Module:
    return layer(WIDTH, dim_head=DIM_HEAD, heads=HEADS, num_landmarks=RANK, residual=False)


def _local(layer: Any, n: int) -> nn.Module:
    # one window back and one ahead of 43 is as near to 128 neighbours as it comes
    return layer(dim=WIDTH, window_size=43, dim_head=DIM_HEAD, heads=HEADS, causal=False)


def _reformer(layer: Any, n: int) -> nn.Module:
    return layer(WIDTH, heads=HEADS, bucket_size=64, n_hashes=4)


LINEAR = "linear_attention_transformer.linear_attention_transformer:SelfAttention"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch.nn.MultiheadAttention", "softmax", "torch.nn:MultiheadAttention", _torch, 16384),
        Peer("x-transformers (flash)", "softmax", "x_transformers:Attention", _x_transformers, 16384),
        Peer(
            "linformer",
            "projected 256",
            "linformer:LinformerSelfAttention",
            lambda layer, n: layer(WIDTH, n, k=RANK, heads=HEADS),
        ),
        Peer("linformer-pytorch", "projected 256", "linformer_pytorch:MHAttention", _linformer_pytorch),
        Peer("reformer-pytorch", "hashed", "reformer_pytorch:LSHSelfAttention", _reformer),
        Peer(
            "performer-pytorch",
            "efficient",
            "performer_pytorch:SelfAttention",
            lambda layer, n: layer(WIDTH, heads=HEADS),
        ),
        Peer("linear-attention-transformer", "efficient", LINEAR, lambda layer, n: layer(WIDTH, HEADS)),
        Peer("nystrom-attention", "nystrom 256", "nystrom_attention:NystromAttention", _nystrom),
        Peer("local-attention", "window 128", "local_attention:LocalMHA", _local),
    )
}

LINFORMER = "LinformerAttention 256"
"""The layer that projects before it maps; it computes the same as `projected 256`."""

OURS = (
    "softmax",
    "window 128",
    "strided",
    "fixed",
    "hashed",
    "projected 256",
    LINFORMER,
    "efficient",
    "factored pooling",
    "nystrom 256",
)


@final
@dataclass(frozen=True)
class LayerTimes:
    """A layer at one length, and how its time compares with that of the layer `against`, forward and with backward.

    For a peer: its time over the time of our layer of the same kind.  For ours: softmax's time over its time.
    """

    name: str
    n: int
    times: Times
    against: str
    ratios: tuple[float, float]


def our_layer(name: str, n: int) -> nn.Module:
    """Our layer of this name for n positions."""
    rank = min(n, RANK)
    if name == LINFORMER:
        return LinformerAttention(WIDTH, HEADS, n, rank, bias=False, out_bias=True)
    learned = LearnedProjection(projected, n, rank, shared=False) if name == "projected 256" else None
    return MultiHead(WIDTH, HEADS, build=learned or CASES[name].build(n), bias=False, out_bias=True)


def layer_calls(name: str, n: int) -> tuple[Call, Call] | None:
    """The forward and the forward and backward call of a layer, ours or a peer's; None if it is not installed."""
    if name in PEERS and not PEERS[name].installed:
        return None
    layer = our_layer(name, n) if name in OURS else PEERS[name].make(n)
    x = torch.randn(1, n, WIDTH, requires_grad=True)
    return forward_and_backward(lambda: layer(x), [x, *(p for p in layer.parameters() if p.requires_grad)])


@seeded(0)  # peers draw from the global random state
def compare_layers(
    n: int,
    *,
    names: Collection[str] | None = None,
    rounds: int = 5,
    seconds: float = 60.0,
    kept: Kept | None = None,
) -> tuple[list[LayerTimes], dict[str, str]]:
    """Every installed peer and every layer of ours in turns at one length; and the errors of peers that failed.

    kept  every round of every layer is added to it, and those that it has are not measured again
    """
    chosen = chosen_layers(n, names)
    kept = Kept(None, {}) if kept is None else kept
    known = {passes: {name: list(_rounds(kept, name, n, passes)) for name in chosen} for passes in PASSES}
    done = all(len(known[passes][name]) >= rounds for passes in PASSES for name in chosen)
    work: dict[str, tuple[Call, Call]] = {}
    failed: dict[str, str] = {}
    for name in () if done else chosen:
        try:
            calls = layer_calls(name, n)
            if calls is not None and name in PEERS:
                calls[1]()
        except Exception as error:
            if name not in PEERS:  # whatever another package raises is reported, not raised
                raise
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            work |= {} if calls is None else {name: calls}

    def keep(passes: str, name: str, turn: int, spent: float) -> None:
        kept.add(_round(name, n, passes, turn), spent)

    times_in_turns(work, rounds=rounds, seconds=seconds, known=known, keep=keep)
    return measured_layers(n, names, kept), failed


def chosen_layers(n: int, names: Collection[str] | None) -> list[str]:
    """The layers of these names that take minutes at length n, and those of ours that they are compared with."""
    names = [*OURS, *PEERS] if names is None else list(names)
    for name in names:
        if name not in OURS and name not in PEERS:
            raise InputError(f"bench peers: there is no layer {name!r}; there are {', '.join([*OURS, *PEERS])}")
    chosen = {*names, *(PEERS[name].ours for name in names if name in PEERS)}  # a peer needs something to compare with
    longest = {LINFORMER: n, **{name: case.longest for name, case in CASES.items()}}
    longest |= {name: peer.longest for name, peer in PEERS.items()}
    return [name for name in (*OURS, *PEERS) if name in chosen and n <= longest[name]]


def measured_layers(n: int, names: Collection[str] | None, kept: Kept) -> list[LayerTimes]:
    """The rows that have been measured so far, whole or in part."""
    times = {}
    for name in chosen_layers(n, names):
        forward, backward = (list(_rounds(kept, name, n, passes)) for passes in PASSES)
        if forward or backward:
            times[name] = Times(timing(forward), timing(backward))
    rows = []
    for name in times:
        against = PEERS[name].ours if name in PEERS else "softmax"
        pair = (name, against) if name in PEERS else (against, name)
        ratios = times[pair[0]].over(times[pair[1]]) if against in times else (math.nan, math.nan)
        rows.append(LayerTimes(name, n, times[name], against, ratios))
    return rows


def _round(name: str, n: int, passes: str, turn: int) -> dict[str, object]:
    return {"layer": name, "n": n, "passes": passes, "round": turn}


def _rounds(kept: Kept, name: str, n: int, passes: str) -> Iterator[float]:
    """The seconds of each round, as far as they have been measured."""
    for turn in itertools.count():
        seconds = kept.get(_round(name, n, passes, turn))
        if not isinstance(seconds, float):
            return
        yield seconds
