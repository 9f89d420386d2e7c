"""Softmax attention as an operator against torch's own call, and what importing the package takes.

    python -m benchmarks.softmax [--quick]

Every round times both sides one after the other; a ratio is taken in each round, and the median over the rounds is
printed with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from headwise.operators import softmax


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Quartiles of time(ours) / time(theirs) over interleaved rounds; who goes first alternates."""
    ours(), theirs()
    found = []
    for turn in range(rounds):
        first, second = (ours, theirs) if turn % 2 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        found.append(a / b if turn % 2 else b / a)
    low, middle, high = statistics.quantiles(found, n=4)
    return low, middle, high


def shown(name: str, quartiles: tuple[float, float, float]) -> None:
    low, middle, high = quartiles
    print(f"  {name:66s} {middle:6.3f}  ({low:.3f} … {high:.3f})")


PEAK = """
import sys, torch
from headwise.operators import softmax
def field(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1024
n = int(sys.argv[1])
q, k, v = torch.randn(1, 1, n, 64), torch.randn(1, 1, n, 64), torch.randn(1, 1, n, 256)
softmax(q[..., :64, :], k[..., :64, :])(v[..., :64, :])
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = field("VmRSS")
softmax(q, k)(v)
print(field("VmHWM") - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    n, rounds = (256, 8) if options.quick else (2048, 25)
    with torch.no_grad():
        q, k, v = torch.randn(3, 1, 8, n, 64)
        wide = torch.randn(1, 8, n, 256)
        op = softmax(q, k)
        direct = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
        print(f"8 heads, n = {n}, key width 64, {torch.get_num_threads()} threads; time over time, quartiles")
        shown("apply / scaled_dot_product_attention, d_v = 64", ratio(lambda: op.apply(v), direct, rounds))
        low, middle, high = ratio(lambda: op.apply(wide), direct, rounds)
        shown("apply at d_v = 256 / apply at d_v = 64, per column", (low / 4, middle / 4, high / 4))
        other = lambda: F.scaled_dot_product_attention(q, k, wide)  # noqa: E731
        shown("apply / scaled_dot_product_attention, d_v = 256", ratio(lambda: op.apply(wide), other, rounds))
        shown("adjoint / apply", ratio(lambda: op.adjoint(v), lambda: op.apply(v), max(4, rounds // 3)))
    long = 1024 if options.quick else 16384
    peak = subprocess.run([sys.executable, "-c", PEAK, str(long)], capture_output=True, text=True, check=True).stdout
    whole = long**2 * 4 / 2**20
    print(f"peak extra memory of one apply, n = {long}, d_v = 256: {float(peak):.0f} MB; P alone: {whole:.0f} MB")
    timing = "import time; s = time.perf_counter(); import headwise; print(time.perf_counter() - s)"
    times = [float(subprocess.check_output([sys.executable, "-c", timing])) for _ in range(5)]
    print(f"import headwise: {1000 * statistics.median(times):.1f} ms")


if __name__ == "__main__":
    main()
