"""The same layer by other packages, in the same run: width 512, 8 heads, one sequence, forward and with backward.

Packages that are not installed are named as absent; none is a dependency.  A layer is compared with ours of the same
idea and the same parameters (no bias but that of the output; E and F learned), its linear maps included on both sides,
so layers differ less than their attention does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from headwise.bench.cases import RANK, entry
from headwise.bench.clock import Timing, in_turns, without_nan
from headwise.errors import InputError
from headwise.nn.builders import LearnedProjection
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.operators import projected

WIDTH, HEADS = 512, 8
Layer = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Peer:
    """A layer `make(n)` of another package, the operator of ours it is compared with, and what to install."""

    name: str
    ours: str
    module: str
    package: str
    make: Layer
    longest: int = 65536

    @property
    def present(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def _torch(n: int) -> nn.Module:
    layer = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    return SelfAttention()


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

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(WIDTH, dim_head=WIDTH // HEADS, heads=HEADS, flash=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            return out[0] if isinstance(out, tuple) else out

    return First()


PEERS = (
    Peer("torch.nn.MultiheadAttention", "exact", "torch", "torch", _torch, 16384),
    Peer("x-transformers (flash)", "exact", "x_transformers", "x-transformers", _x_transformers, 16384),
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
SHORTENED = "shortened 256"
"""The layer that projects before it maps; what it computes is `projected 256`."""
OURS = (
    "exact",
    "window 128",
    "strided",
    "fixed",
    "hashed",
    "projected 256",
    SHORTENED,
    "efficient",
    "factored pooling",
    "nystrom 256",
)


@dataclass(frozen=True)
class Comparison:
    """One layer at one length; ratios are its time over that of ours with the same idea (for ours, exact's over it)."""

    name: str
    n: int
    forward: Timing
    both: Timing
    against: str
    ratio_forward: float
    ratio_both: float

    def to_dict(self) -> dict[str, object]:
        return without_nan(asdict(self))


def ours(name: str, n: int) -> nn.Module:
    """A layer of ours for n positions by its name in the table."""
    rank = min(n, RANK)
    if name == SHORTENED:
        return LinformerAttention(WIDTH, HEADS, n, rank, bias=False, out_bias=True)
    learned = LearnedProjection(projected, n, rank, shared=False) if name == "projected 256" else None
    return MultiHead(WIDTH, HEADS, build=learned or entry(name).build(n), bias=False, out_bias=True)


def absent() -> list[Peer]:
    return [peer for peer in PEERS if not peer.present]


def compare(
    n: int, *, names: Collection[str] | None = None, rounds: int = 5, seconds: float = 60.0
) -> tuple[list[Comparison], dict[str, str]]:
    """Every installed peer and every layer of ours in turns at one length; and why a peer could not run."""
    torch.manual_seed(0)
    if names is not None:
        known = [*OURS, *(peer.name for peer in PEERS)]
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"bench peers: {unknown[0]!r} is not among {', '.join(known)}")
        names = {*names, *(peer.ours for peer in PEERS if peer.name in names)}  # a peer runs against something
    layers: dict[str, nn.Module] = {}
    against: dict[str, str] = {}
    failed: dict[str, str] = {}
    x = torch.randn(1, n, WIDTH, requires_grad=True)
    for name in OURS:
        if (name == SHORTENED or n <= entry(name).longest) and (names is None or name in names):
            layers[name] = ours(name, n)
    for peer in PEERS:
        if peer.present and n <= peer.longest and (names is None or peer.name in names):
            try:
                layer = peer.make(n)
                backward_of(layer, x)()
            except Exception as error:  # another package's, of any version: whatever it raises is its own affair
                failed[peer.name] = f"{type(error).__name__}: {error}"
                continue
            layers[peer.name], against[peer.name] = layer, peer.ours
    forwards = in_turns({k: forward_of(m, x) for k, m in layers.items()}, rounds=rounds, seconds=seconds)
    boths = in_turns({k: backward_of(m, x) for k, m in layers.items()}, rounds=rounds, seconds=2 * seconds)
    rows = []
    for name in layers:
        other = against.get(name)
        if other in layers and other is not None:
            ratios = forwards[name].over(forwards[other]), boths[name].over(boths[other])
        else:
            other = "exact"
            both = "exact" in layers
            ratios = (
                (forwards["exact"].over(forwards[name]), boths["exact"].over(boths[name]))
                if both
                else (float("nan"),) * 2
            )
        rows.append(Comparison(name, n, forwards[name], boths[name], other, *ratios))
    return rows, failed


def forward_of(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def backward_of(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def call() -> None:
        torch.autograd.grad(layer(x).sum(), wanted, allow_unused=True)

    return call
