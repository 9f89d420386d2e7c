"""Attention by relative position against convolution: nine heads, 64 channels, maps of 32, 64 and 128 cells a side.

    python benchmarks/convolution.py exact  [--sides 32 64 128] [--rounds 60]   exact / conv2d, forward and backward
    python benchmarks/convolution.py nets   [--rounds 60]   whole networks: residual, depthwise, 3-D, 1-D
    python benchmarks/convolution.py time   [--sides 32 64 128] [--rounds 30] [--threads 1]
    python benchmarks/convolution.py memory [--sides 64 128 256]
    python benchmarks/convolution.py alpha       error and centre gradients of soft heads against alpha
    python benchmarks/convolution.py encodings   multiply-adds by positional encoding

Times are ratios within one run: every round times all methods one after the other, a ratio is taken in each round, and
the median over the rounds is printed with its quartiles.  A busy machine slows all methods of a round alike.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.convolution import convert, exact, soft, soft_separable
from headwise.nn.kernel_attention import QuadraticAttention
from headwise.operators.base import AttentionOperator
from headwise.operators.softmax import softmax
from headwise.theory.convolution import centres_stop_learning, encoding_costs

CHANNELS, KERNEL, ALPHA = 64, 3, 6.0
DENSE_ROUNDS = 3  # dense attention takes seconds


def methods(side: int, seed: int = 0) -> dict[str, Callable[[], Tensor]]:
    torch.manual_seed(seed)
    conv = nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1).eval()
    x = torch.randn(1, CHANNELS, side, side)
    shifts, separable, free = (convert(conv, mode)[0].eval() for mode in (exact, soft_separable(ALPHA), soft(ALPHA)))
    kernel, bias = conv.weight.detach().flatten(1), conv.bias.detach()  # pyright: ignore

    def unfolded() -> Tensor:
        y = kernel @ F.unfold(x, KERNEL, padding=1) + bias[:, None]
        return y.unflatten(-1, (side, side))

    assert isinstance(free, QuadraticAttention)
    return {
        "conv2d": lambda: conv(x),
        "exact": lambda: shifts(x),
        "unfold": unfolded,
        "soft, separable": lambda: separable(x),
        "soft, nine free heads": lambda: free(x),
        "dense softmax, fused": lambda: dense(free, x, lambda p, v: p(v)),
        "dense softmax, P formed": lambda: dense(free, x, lambda p, v: p.dense() @ v),
    }


def dense(layer: QuadraticAttention, x: Tensor, attend: Callable[[AttentionOperator, Tensor], Tensor]) -> Tensor:
    """The same nine heads as dense softmax attention: -alpha |k - q - c|^2 as a dot product of width 3."""
    wide = F.pad(x, (1, 1, 1, 1))
    sides, m = wide.shape[2:], x.shape[2] * x.shape[3]
    keys = torch.cartesian_prod(*(torch.arange(float(s)) for s in sides))
    queries = torch.cartesian_prod(*(torch.arange(float(s)) for s in x.shape[2:]))
    at = queries + layer.centres.unsqueeze(1)  # (h, m, 2)
    q = torch.cat([2 * ALPHA * at, torch.full((*at.shape[:2], 1), -ALPHA)], dim=-1)
    k = torch.cat([keys, keys.square().sum(-1, keepdim=True)], dim=-1)
    values = wide.flatten(2).mT.contiguous()  # transposed values would make the fused kernel form P after all
    p = softmax(q, k.expand(len(q), *k.shape), scale=1.0)
    attended = attend(p, values.expand(len(q), -1, -1))  # (h, m, d)
    y = torch.einsum("hmi,oih->om", attended, layer.weight.flatten(2)).reshape(1, -1, *x.shape[2:])
    assert y.shape[2] * y.shape[3] == m
    return y + layer.bias.reshape(-1, 1, 1)  # pyright: ignore


def exact_ratios(sides: list[int], rounds: int) -> None:
    """Time of `exact` / time of conv2d: forward without gradients, and forward plus backward.

    Smaller maps take less time and vary more, so they get more rounds: `rounds` at the largest side.
    """
    for side in sides:
        torch.manual_seed(0)
        conv = nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1)
        x = torch.randn(1, CHANNELS, side, side)
        print_ratios(f"{side} x {side}   exact / conv2d", conv, x, rounds * (max(sides) // side) ** 2)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Small networks of the usual kinds of convolution, and an input."""
    c = 32
    basic = [nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()]
    basic += [nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)]
    inverted = [nn.Conv2d(c, 4 * c, 1), nn.BatchNorm2d(4 * c), nn.ReLU6()]
    inverted += [nn.Conv2d(4 * c, 4 * c, 3, padding=1, groups=4 * c), nn.BatchNorm2d(4 * c), nn.ReLU6()]
    inverted += [nn.Conv2d(4 * c, c, 1), nn.BatchNorm2d(c)]
    volume = [nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, stride=2, padding=1), nn.ReLU()]
    wave = [nn.Conv1d(1, c, 9, stride=4), nn.ReLU(), nn.Conv1d(c, c, 3, dilation=4, padding=4), nn.ReLU()]

    def blocks(parts: list[nn.Module]) -> nn.Module:
        stem = nn.Conv2d(3, c, 3, padding=1)
        return nn.Sequential(stem, *(Residual(copy.deepcopy(nn.Sequential(*parts))) for _ in range(4)))

    image = torch.randn(4, 3, 32, 32)
    return {
        "residual, 3 x 3": (blocks(basic), image),
        "inverted residual, depthwise": (blocks(inverted), image),
        "3-D": (nn.Sequential(*volume), torch.randn(2, 1, 24, 24, 24)),
        "1-D, strided and dilated": (nn.Sequential(*wave), torch.randn(4, 1, 16_000)),
    }


def print_ratios(what: str, old: nn.Module, x: Tensor, rounds: int) -> None:
    """Time of the converted module / time of the original."""
    new, x = convert(old)[0], x.requires_grad_()

    def forward(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module(x)

    def backward(module: nn.Module) -> None:
        torch.autograd.grad(module(x).sum(), [x, *module.parameters()])

    for name, run in {"forward": forward, "backward": backward}.items():
        ratios = []
        for i in range(rounds + 3):
            order = (old, new) if i % 2 else (new, old)  # the second one finds a warmer cache
            taken = {module: seconds(lambda run=run, module=module: run(module)) for module in order}
            ratios.append(taken[new] / taken[old])
        print(f"{what}, {name:<10}{spread(ratios[3:])}")


def seconds(call: Callable[[], object]) -> float:
    """Processor time on one thread, which other programs do not disturb; wall-clock time on several."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


@torch.no_grad()
def times(sides: list[int], rounds: int) -> None:
    print(f"{torch.get_num_threads()} threads, {CHANNELS} channels, {KERNEL * KERNEL} heads; time / time of conv2d")
    for side in sides:
        calls = methods(side)
        expected = calls["conv2d"]()
        quick = {name: call for name, call in calls.items() if not name.startswith("dense")}
        for name, call in calls.items():
            if not (name.startswith("dense") and side > 64):
                error = (call() - expected).abs().max().item()
                assert error < (1e-4 if name in ("exact", "unfold", "conv2d") else 0.2), f"{name} is off by {error}"
        taken: dict[str, list[float]] = {name: [] for name in quick}
        for _ in range(rounds):
            for name, call in quick.items():
                taken[name].append(seconds(call))
        print(f"{side} x {side}   conv2d {1e3 * statistics.median(taken['conv2d']):.2f} ms")
        for name in list(quick)[1:]:
            print(f"    {name:<24}{spread([a / b for a, b in zip(taken[name], taken['conv2d'], strict=True)])}")
        for name in [name for name in calls if name.startswith("dense") and not (side > 64 and "formed" in name)]:
            against = {"exact": [], "soft, separable": []}
            for _ in range(DENSE_ROUNDS):
                slow = seconds(calls[name])
                for quick_name, ratios in against.items():
                    ratios.append(slow / seconds(calls[quick_name]))
            for quick_name, ratios in against.items():
                print(f"    {name} / {quick_name}: {spread(ratios)}")


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:8.2f}   ({low:.2f} to {high:.2f})"


def memory(sides: list[int]) -> None:
    """Peak memory beyond the idle process, in a new process for every cell of the table."""
    print("bytes per map cell beyond the idle process (the output of conv2d alone: 256)")
    for name in ("conv2d", "exact", "unfold", "soft, separable", "soft, nine free heads"):
        row = []
        for side in sides:
            command = [sys.executable, __file__, "peak", "--name", name, "--sides", str(side)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row.append(f"{side}²: {int(out) / side**2:8.0f}")
        print(f"    {name:<24}{'   '.join(row)}")
    for side in sides:
        print(f"    dense P of nine heads, {side}²: {9 * 4 * side**2:,} bytes per map cell (not run)")


@torch.no_grad()
def peak(name: str, side: int) -> None:
    methods(8)[name]()  # load every library first
    call = methods(side)[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def alphas() -> None:
    print("alpha   error / rms, float32   / e^-alpha   float64   largest gradient of a centre, / (alpha e^-alpha)")
    torch.manual_seed(0)
    conv, x = nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1), torch.randn(2, CHANNELS, 16, 16)
    for alpha in (2.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 24.0):
        single = convert(conv, soft_separable(alpha), probe=x)[1]
        double = convert(conv.double(), soft_separable(alpha), probe=x.double())[1]
        conv.float()
        gradient = centres_stop_learning(alpha, 9)
        rms = conv(x).square().mean().sqrt().item()
        relative = single.largest_change / rms
        print(
            f"{alpha:5.0f}   {relative:21.1e}   {relative * math.exp(alpha):10.1f}   "
            f"{double.largest_change / rms:.1e}   {gradient.measured:.1e}, "
            f"{gradient.measured / (alpha * math.exp(-alpha)):.1f}"
        )


def encodings() -> None:
    for grid in ((16, 16), (32, 32), (64, 64), (128, 128)):
        costs = encoding_costs(grid, CHANNELS)
        print(f"{grid[0]} x {grid[1]}   " + "   ".join(f"{k} {v.multiply_adds:.2e}" for k, v in costs.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exact", "nets", "time", "memory", "alpha", "encodings", "peak"])
    parser.add_argument("--sides", type=int, nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "time":
        times(options.sides or [32, 64, 128], options.rounds or 30)
    elif options.what == "exact":
        exact_ratios(options.sides or [32, 64, 128], options.rounds or 60)
    elif options.what == "nets":
        for name, (net, x) in networks().items():
            print_ratios(f"{name:<30}", net, x, options.rounds or 60)
    elif options.what == "memory":
        memory(options.sides or [64, 128, 256])
    elif options.what == "peak":
        peak(options.name, options.sides[0])
    elif options.what == "alpha":
        alphas()
    else:
        encodings()


if __name__ == "__main__":
    main()
