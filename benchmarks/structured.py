"""How much faster the structured operators apply than the same P formed and multiplied, by length.

    python -m benchmarks.structured             every operator, n = 128 to 2048
    python -m benchmarks.structured --quick     up to n = 512

Each figure is (time to form P and multiply) / (time of apply) in one run, d = 64 columns, one thread: above 1 the
operator wins.  Times are processor seconds, which a busy machine disturbs less than elapsed ones.  Runs of the two are
interleaved; the median is printed, with the smallest and the largest ratio.  The rows "toeplitz, rows" and "toeplitz,
transforms" show where the switch between them, toeplitz.SHORT, belongs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.operators._kernels.row_chunks import apply_rows
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product
from headwise.operators.relative.toeplitz import by_fourier, toeplitz_softmax, windows
from headwise.operators.uniform import uniform

D, REPEATS = 64, 21
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]


def pairs(n: int) -> dict[str, Pair]:
    """name -> (P formed and multiplied, the operator)"""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, D, generator=g) for _ in range(3))
    w, t = torch.randn(2 * D, generator=g), torch.randn(2 * n - 1, generator=g)
    linear_bias = -0.1 * torch.arange(-(n - 1), n).abs()
    counts = torch.arange(1, n + 1).unsqueeze(-1)

    def formed_relu() -> Tensor:
        return ((q @ w[:D]).unsqueeze(-1) + (k @ w[D:])).relu()

    kept = {
        "uniform, causal": uniform(n, n, causal=True),
        "dot product": dot_product(q, k),
        "dot product, causal": dot_product(q, k, causal=True),
        "concatenation": concatenation(q, k, w),
        "concatenation, causal": concatenation(q, k, w, causal=True),
        "toeplitz softmax": toeplitz_softmax(linear_bias, n, n),
    }
    formed: dict[str, Callable[[], Tensor]] = {
        "uniform, causal": lambda: (torch.ones(n, n).tril() / counts) @ v,
        "dot product": lambda: (q @ k.mT / n) @ v,
        "dot product, causal": lambda: ((q @ k.mT).tril() / counts) @ v,
        "concatenation": lambda: (formed_relu() / n) @ v,
        "concatenation, causal": lambda: (formed_relu().tril() / counts) @ v,
        "toeplitz softmax": lambda: linear_bias.unfold(-1, n, 1).flip(-2).softmax(-1) @ v,
    }
    toeplitz = lambda: t.unfold(-1, n, 1).flip(-2) @ v  # noqa: E731
    return {name: (formed[name], lambda op=op: op(v)) for name, op in kept.items()} | {
        "toeplitz, rows": (toeplitz, lambda: apply_rows(lambda a, b: windows(t, n, n, a, b), (n, n), v)),
        "toeplitz, transforms": (toeplitz, lambda: by_fourier(t, v, n)),
    }


def seconds(call: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def ratios(slow: Callable[[], Tensor], fast: Callable[[], Tensor]) -> list[float]:
    error = (slow() - fast()).abs().max() / slow().abs().max()
    assert error < 1e-3, f"the two differ by {error:.1e}: not the same P"
    return sorted(seconds(slow) / seconds(fast) for _ in range(REPEATS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to n = 512")
    lengths = (128, 256, 512) if parser.parse_args().quick else (128, 256, 512, 1024, 2048)
    torch.set_num_threads(1)
    print(f"{'formed / operator':24}" + "".join(f"{f'n = {n}':>24}" for n in lengths))
    table: dict[str, list[str]] = {}
    for n in lengths:
        for name, pair in pairs(n).items():
            found = ratios(*pair)
            cell = f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
            table.setdefault(name, []).append(cell)
    for name, cells in table.items():
        print(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
