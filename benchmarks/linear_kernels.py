"""The double softmax, exact attention by tiles, and layers of other packages: with the compiled kernels and without.

    python -m benchmarks.linear_kernels                  all tables: minutes
    python -m benchmarks.linear_kernels --quick          n <= 512, three rounds
    python -m benchmarks.linear_kernels --only layers    one of the tables; --n 1024 at one length
    python -m benchmarks.linear_kernels --threads 2      elapsed time on two threads, for an idle machine

Each ratio is (time of a call) / (time of the reference that the title names): processor time of one thread, operators
built anew in every call, the median over rounds in which all calls take turns, and the quartiles.  "kernels" and
"torch" are the two paths of the same call; beside them are the plain formula and torch.compile of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bench import forward_and_backward
from headwise.bench.cases import RANK
from headwise.bench.clock import Call
from headwise.bench.peers import LINFORMER, layer_calls
from headwise.cli.tables import print_table
from headwise.operators import efficient, softmax
from headwise.operators._kernels import native

HEADS, WIDTH, SQUARE = 8, 64, 2048
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Rows = list[list[str]]
Result = TypeVar("Result")


def seconds(call: Call) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def in_turns(work: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, in rounds in which all take turns, after one that is not counted."""
    for call in work.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            times[name].append(seconds(call))
    return times


def ratio(times: Mapping[str, list[float]], name: str, reference: str) -> str:
    each = [x / y for x, y in zip(times[name], times[reference], strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def with_kernels(call: Callable[..., Result], mode: str) -> Callable[..., Result]:
    def run(*args: object) -> Result:
        with native.switched(mode):
            return call(*args)

    return run


def inputs(n: int, width: int = WIDTH, heads: int = HEADS) -> list[Tensor]:
    """q, k, v as a layer computes them: views (b, h, n, d) of (b, n, h d)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, heads, width, generator=generator).transpose(1, 2) for _ in range(3)]


def both(calls: Mapping[str, Attention], tensors: Sequence[Tensor], rounds: int) -> list[dict[str, list[float]]]:
    """Times forward, and forward and backward."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    pull = torch.randn(tensors[0].shape)
    found = []
    for which, given in ((0, tensors), (1, leaves)):
        work = {name: forward_and_backward(partial(call, *given), given, pull)[which] for name, call in calls.items()}
        found.append(in_turns(work, rounds))
    return found


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.5
    return (q * scale).softmax(-1) @ ((k * scale).softmax(-2).mT @ v)


def double_softmax(quick: bool, lengths: Sequence[int]) -> Rows:
    found = []
    for n in lengths:
        ours = lambda q, k, v: efficient(q, k)(v)  # noqa: E731
        calls: dict[str, Attention] = {"kernels": with_kernels(ours, "build"), "torch": with_kernels(ours, "off")}
        calls |= {"formula": formula, "torch.compile of the formula": torch.compile(formula, dynamic=False)}
        times = both(calls, inputs(n), 3 if quick else max(3, 32768 // n))
        found += [[name, str(n), *(ratio(x, name, "kernels") for x in times)] for name in calls if name != "kernels"]
    return found


def roof(quick: bool, lengths: Sequence[int]) -> Rows:
    """(time of the products at the rate of a large square product) / (time of all)."""
    found = []
    a, b, out = torch.randn(3, SQUARE, SQUARE).unbind(0)
    for n in lengths:
        ours = lambda q, k, v: efficient(q, k)(v)  # noqa: E731
        calls = {mode: with_kernels(ours, mode) for mode in ("build", "off")}
        square = in_turns({"square": partial(torch.mm, a, b, out=out)}, 3)["square"]
        rate = 2 * SQUARE**3 / statistics.median(square)
        for name, products in (("kernels", "build"), ("torch", "off")):
            row = [name, str(n)]
            for times, count in zip(both({products: calls[products]}, inputs(n), 5), (2, 6), strict=True):
                operations = count * 2 * HEADS * n * WIDTH**2
                row.append(f"{operations / rate / statistics.median(times[products]):.2f} of {rate / 1e9:.0f} GFLOP/s")
            found.append(row)
    return found


def causal(quick: bool, lengths: Sequence[int]) -> Rows:
    found = []
    for n in lengths:
        ours = lambda q, k, v: efficient(q, k, causal=True)(v)  # noqa: E731
        calls: dict[str, Attention] = {"kernels": with_kernels(ours, "build"), "torch": with_kernels(ours, "off")}
        times = both(calls, inputs(n), 3 if quick else 5)
        found.append(["torch", str(n), *(ratio(x, "torch", "kernels") for x in times)])
    return found


def exact(quick: bool, lengths: Sequence[int]) -> Rows:
    found = []
    for width in (64,) if quick else (32, 64, 128):
        for n in lengths:
            heads = HEADS if n <= 2048 else 1
            for name, options in (("", {}), (", causal", {"causal": True})):
                ours = lambda q, k, v, options=options: softmax(q, k, **options)(v)  # noqa: E731
                calls: dict[str, Attention] = {
                    "kernels": with_kernels(ours, "build"),
                    "torch": with_kernels(ours, "off"),
                    "SDPA": partial(F.scaled_dot_product_attention, is_causal=bool(options)),
                }
                times = both(calls, inputs(n, width, heads), 3 if quick or n > 512 else 15)
                for path in ("kernels", "torch"):
                    what = f"{heads} heads of {width}{name}, {path}"
                    found.append([what, str(n), *(ratio(x, path, "SDPA") for x in times)])
    return found


PEERS = {
    "hashed": "reformer-pytorch",
    "projected 256": "linformer",
    LINFORMER: "linformer",
    "efficient": "linear-attention-transformer",
}


def shared_products(n: int) -> Call:
    """Four maps of n rows and two projections to RANK slots: what a layer of Linformer cannot do without."""
    width = HEADS * WIDTH
    x, w, e = torch.randn(n, width), torch.randn(width, width), torch.randn(min(n, RANK), n)

    def run() -> None:
        for _ in range(4):
            torch.mm(x, w)
        for _ in range(2):
            torch.mm(e, x)

    return run


def layers(quick: bool, lengths: Sequence[int]) -> Rows:
    found = []
    for n in lengths:
        for ours, peer in PEERS.items():
            calls = {name: pair for name in (ours, peer) if (pair := layer_calls(name, n)) is not None}
            if peer not in calls:
                found.append([f"{ours}, {peer} is not installed", str(n), "", ""])
                continue
            for mode in ("build", "off"):
                row = [f"{peer} over {ours}, {'kernels' if mode == 'build' else 'torch'}", str(n)]
                for which in (0, 1):
                    work = {name: with_kernels(pair[which], mode) for name, pair in calls.items()}
                    row.append(ratio(in_turns(work, 3 if quick else 9), peer, ours))
                found.append(row)
            if ours == "projected 256":
                forward = {name: with_kernels(pair[0], "build") for name, pair in calls.items()}
                times = in_turns({**forward, "products": shared_products(n)}, 3 if quick else 9)
                for name in calls:
                    bound = ratio(times, name, "products")
                    found.append([f"{name} over the products that both share", str(n), bound, ""])
    return found


LONG = (1024, 4096, 16384, 65536)
TABLES: dict[str, tuple[str, tuple[int, ...], Callable[[bool, Sequence[int]], Rows]]] = {
    "double softmax": ("efficient, 8 heads of 64: time over that with kernels", LONG, double_softmax),
    "roof": ("efficient, 8 heads of 64: share of the rate of a square product", LONG, roof),
    "causal": ("efficient, causal, 8 heads of 64: time over that with kernels", LONG[:3], causal),
    "exact": ("softmax, built in every call: time over torch's fused attention", (128, 512, 2048, 8192), exact),
    "layers": ("Layers of width 512, 8 heads: time of another package over ours", LONG[:2], layers),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n <= 512, three rounds")
    parser.add_argument("--only", choices=tuple(TABLES), help="one table")
    parser.add_argument("--n", nargs="+", type=int, metavar="N", help="other lengths")
    parser.add_argument("--threads", type=int, default=1, help="more than one: elapsed time")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with native.switched("build"):
        if not native.LIBRARY.ready():
            parser.error(f"the kernels cannot be used: {native.LIBRARY.reason}")
    for name, (title, lengths, measure) in TABLES.items():
        if options.only in (None, name):
            lengths = options.n or ([512] if options.quick else lengths)
            print_table(title, ["what", "n", "forward", "forward and backward"], measure(options.quick, lengths))


if __name__ == "__main__":
    main()
