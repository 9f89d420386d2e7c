"""The same layer by other packages, in the same run: width 512, 8 heads, one sequence, with and without backward.

Packages that are not installed are skipped; none is a dependency.  A layer is compared with ours of the same idea and
the same parameters (no bias but that of the output; E and F learned), linear maps included on both sides, so layers
differ less than their attention does.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from headwise.bench.cases import CASES, RANK
from headwise.bench.clock import Call, Times, forward_and_backward, times_in_turns
from headwise.errors import InputError
from headwise.nn.builders import LearnedProjection
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.operators import projected

WIDTH, HEADS = 512, 8


@final
@dataclass(frozen=True)
class Peer:
    """A layer `make(n)` of another package, the operator it is compared with, and the package to install."""

    name: str
    ours: str
    module: str
    package: str
    make: Callable[[int], nn.Module]
    longest: int = 65536

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


class _SelfAttention(nn.Module):
    """`call(layer, x)` as a module of x alone."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _torch(n: int) -> nn.Module:
    layer = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    return _SelfAttention(layer, lambda layer, x: layer(x, x, x, need_weights=False)[0])


def _linformer(n: int) -> nn.Module:
    from linformer import LinformerSelfAttention  # pyright: ignore[reportMissingImports]

    return LinformerSelfAttention(WIDTH, n, k=RANK, heads=HEADS)


def _linformer_pytorch(n: int) -> nn.Module:
    from linformer_pytorch import MHAttention  # pyright: ignore[reportMissingImports]
    from linformer_pytorch.linformer_pytorch import get_EF  # pyright: ignore[reportMissingImports]

    e, f = get_EF(n, RANK), get_EF(n, RANK)
    return MHAttention(n, WIDTH // HEADS, WIDTH, RANK, HEADS, 0.0, "C0", "layerwise", e, f, False, None)


def _reformer(n: int) -> nn.Module:
    from reformer_pytorch import LSHSelfAttention  # pyright: ignore[reportMissingImports]

    return LSHSelfAttention(WIDTH, heads=HEADS, bucket_size=64, n_hashes=4)


def _performer(n: int) -> nn.Module:
    from performer_pytorch import SelfAttention  # pyright: ignore[reportMissingImports]

    return SelfAttention(WIDTH, heads=HEADS)


def _nystrom(n: int) -> nn.Module:
    from nystrom_attention import NystromAttention  # pyright: ignore[reportMissingImports]

    return NystromAttention(WIDTH, dim_head=WIDTH // HEADS, heads=HEADS, num_landmarks=RANK, residual=False)


def _local(n: int) -> nn.Module:
    from local_attention import LocalMHA  # pyright: ignore[reportMissingImports]

    # one window back and one ahead of 43 is as near to 128 neighbours as it comes
    return LocalMHA(dim=WIDTH, window_size=43, dim_head=WIDTH // HEADS, heads=HEADS, causal=False)


def _linear(n: int) -> nn.Module:
    from linear_attention_transformer.linear_attention_transformer import (  # pyright: ignore[reportMissingImports]
        SelfAttention,
    )

    return SelfAttention(WIDTH, HEADS)


def _x_transformers(n: int) -> nn.Module:
    from x_transformers import Attention  # pyright: ignore[reportMissingImports]

    layer = Attention(WIDTH, dim_head=WIDTH // HEADS, heads=HEADS, flash=True)
    return _SelfAttention(layer, lambda layer, x: out[0] if isinstance(out := layer(x), tuple) else out)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch.nn.MultiheadAttention", "softmax", "torch", "torch", _torch, 16384),
        Peer("x-transformers (flash)", "softmax", "x_transformers", "x-transformers", _x_transformers, 16384),
        Peer("linformer", "projected 256", "linformer", "linformer", _linformer),
        Peer("linformer-pytorch", "projected 256", "linformer_pytorch", "linformer-pytorch", _linformer_pytorch),
        Peer("reformer-pytorch", "hashed", "reformer_pytorch", "reformer-pytorch", _reformer),
        Peer("performer-pytorch", "efficient", "performer_pytorch", "performer-pytorch", _performer),
        Peer(
            "linear-attention-transformer",
            "efficient",
            "linear_attention_transformer",
            "linear-attention-transformer",
            _linear,
        ),
        Peer("nystrom-attention", "nystrom 256", "nystrom_attention", "nystrom-attention", _nystrom),
        Peer("local-attention", "window 128", "local_attention", "local-attention", _local),
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


def compare_layers(
    n: int, *, names: Collection[str] | None = None, rounds: int = 5, seconds: float = 60.0
) -> tuple[list[LayerTimes], dict[str, str]]:
    """Every installed peer and every layer of ours in turns at one length; and the errors of peers that failed."""
    torch.manual_seed(0)
    names = [*OURS, *PEERS] if names is None else list(names)
    for name in names:
        if name not in OURS and name not in PEERS:
            raise InputError(f"bench peers: there is no layer {name!r}; there are {', '.join([*OURS, *PEERS])}")
    chosen = {*names, *(PEERS[name].ours for name in names if name in PEERS)}  # a peer needs something to compare with
    longest = {LINFORMER: n, **{name: case.longest for name, case in CASES.items()}}
    longest |= {name: peer.longest for name, peer in PEERS.items()}
    work: dict[str, tuple[Call, Call]] = {}
    failed: dict[str, str] = {}
    for name in (name for name in (*OURS, *PEERS) if name in chosen and n <= longest[name]):
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
    times = times_in_turns(work, rounds=rounds, seconds=seconds)
    rows = []
    for name in work:
        against = PEERS[name].ours if name in PEERS else "softmax"
        pair = (name, against) if name in PEERS else (against, name)
        ratios = times[pair[0]].over(times[pair[1]]) if against in times else (math.nan, math.nan)
        rows.append(LayerTimes(name, n, times[name], against, ratios))
    return rows, failed
