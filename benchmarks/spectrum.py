"""128 leading singular values of one softmax head, d = 64: from apply and adjoint, and from a formed P.

    python -m benchmarks.spectrum                   n = 4096 against svdvals, n = 16384 against svd_lowrank
    python -m benchmarks.spectrum --quick           the same at n = 1024 and 2048
    python -m benchmarks.spectrum --trade           block width against steps: error and time on several heads
    python -m benchmarks.spectrum --threads 1       fewer threads; on a busy machine two of them wait for each other

q and k are 2 N(0, 1), so that scores have a standard deviation of 4: a sharp head, whose spectrum falls slowly and is
the hard case.  Every measurement is a fresh process: memory is its peak less what it held before the call, and times
are of the call alone.  Runs are interleaved, medians are printed with the spread between the extremes, and processor
seconds beside elapsed ones.  svd_lowrank is given twice: with as many columns as values and its default of two
iterations, and with what it needs to get the leading 32 values right to 1e-3, as the Krylov method does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.linalg.krylov import singular_values
from headwise.operators.softmax import softmax

R, WIDTH = 128, 64
SHOWN = (8, 32, 64, 128)


@dataclass(frozen=True)
class Run:
    """One call in its own process."""

    seconds: float
    processor: float
    megabytes: float
    values: Tensor
    errors: Tensor


def head(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = (2 * torch.randn(n, WIDTH, generator=g) for _ in range(2))
    return q, k


def formed(q: Tensor, k: Tensor) -> Tensor:
    scores = (q / math.sqrt(WIDTH)) @ k.mT
    return torch.softmax(scores, dim=-1, out=scores)  # in place: one n x n buffer is the least that forming P takes


def matrix_free(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    found = softmax(q, k).spectrum(R)
    return found.values, found.errors


def many_steps(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A reference where no dense one is affordable: twice the steps."""
    op = softmax(q, k)
    found = singular_values(op.apply, op.adjoint, op.shape, R, like=op.like, steps=12)
    return found.values, found.errors


def svdvals(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.linalg.svdvals(formed(q, k))[:R]
    return values, torch.zeros_like(values)


def lowrank(columns: int, iterations: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.svd_lowrank(formed(q, k), q=columns, niter=iterations)[1][:R]
        return values, torch.full_like(values, torch.nan)  # it states no error

    return run


METHODS = {
    "matrix-free": matrix_free,
    "reference": many_steps,
    "svdvals": svdvals,
    "svd_lowrank(128, niter=2)": lowrank(128, 2),
    "svd_lowrank(256, niter=4)": lowrank(256, 4),
}


def held() -> float:
    """Megabytes this process holds now."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def work(method: str, n: int, threads: int) -> None:
    """What a fresh process does: warm up on a small head, then one measured call, printed as JSON."""
    torch.set_num_threads(threads)
    call = METHODS[method]
    call(*head(800))
    q, k = head(n)
    before, start, busy = held(), time.perf_counter(), time.process_time()
    values, errors = call(q, k)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "processor": time.process_time() - busy,
                "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
                "values": values.tolist(),
                "errors": errors.tolist(),
            }
        )
    )


def measure(method: str, n: int, threads: int) -> Run:
    command = [sys.executable, "-m", "benchmarks.spectrum", "--work", method, "--n", str(n), "--threads", str(threads)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    values, errors = (torch.tensor(answer.pop(name), dtype=torch.float64) for name in ("values", "errors"))
    return Run(**answer, values=values, errors=errors)


def interleaved(methods: list[str], n: int, rounds: int, threads: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            runs[method].append(measure(method, n, threads))
    return runs


def report(n: int, runs: dict[str, list[Run]], truth: Tensor) -> None:
    """One row a method; ratios are taken round by round to the matrix-free run of that round."""
    print(f"\nn = {n}, {R} values, d = {WIDTH}; relative error over the first {', '.join(map(str, SHOWN))}")
    ours = runs["matrix-free"]
    for method, several in runs.items():
        seconds = [run.seconds for run in several]
        ratio = statistics.median(run.seconds / own.seconds for run, own in zip(several, ours, strict=True))
        busy = statistics.median(run.processor / own.processor for run, own in zip(several, ours, strict=True))
        space = statistics.median(run.megabytes / own.megabytes for run, own in zip(several, ours, strict=True))
        off = (several[0].values - truth).abs() / truth
        print(
            f"  {method:27s} {statistics.median(seconds):7.2f} s (+-{(max(seconds) - min(seconds)) / 2:.2f})"
            f"  x{ratio:5.1f} (processor x{busy:5.1f})  {statistics.median(run.megabytes for run in several):6.0f} MB"
            f"  x{space:4.1f}   errors " + " ".join(f"{off[:i].amax():.0e}" for i in SHOWN)
        )
    stated = ours[0].errors / truth
    within = bool(((ours[0].values - truth).abs() <= ours[0].errors + 4e-6 * truth[0]).all())
    print(
        "  matrix-free states          "
        + " " * 53
        + "  errors "
        + " ".join(f"{stated[:i].amax():.0e}" for i in SHOWN)
        + ("  and keeps them" if within else "  AND DOES NOT KEEP THEM")
    )


def trade(n: int, threads: int) -> None:
    """Errors of the first 32 and all 128 values, worst over heads, against block and steps; time in units of 64 x 6."""
    torch.set_num_threads(threads)
    choices = ((64, 4), (64, 5), (64, 6), (64, 8), (32, 12), (96, 5), (128, 3), (128, 4))
    print(f"\nn = {n}: scores with a standard deviation of 1, 2, 4 and 8, with and without an attention sink")
    worst = {choice: [0.0, 0.0, 0.0] for choice in choices}
    for sharpness in (1.0, 2.0, 4.0, 8.0):
        for sink in (0.0, 8.0):
            g = torch.Generator().manual_seed(0)
            q, k = (math.sqrt(sharpness) * torch.randn(n, WIDTH, generator=g) for _ in range(2))
            bias = torch.zeros(n)
            bias[0] = sink
            op = softmax(q, k, attn_bias=bias)
            truth = torch.linalg.svdvals(op.dense())[:R].double()
            for block, steps in choices:
                start = time.process_time()
                found = singular_values(op.apply, op.adjoint, op.shape, R, like=op.like, block=block, steps=steps)
                spent = time.process_time() - start
                off = (found.values - truth).abs() / truth
                entry = worst[block, steps]
                worst[block, steps] = [max(entry[0], off[:32].amax().item()), max(entry[1], off.amax().item()), 0.0]
                worst[block, steps][2] = entry[2] + spent
    unit = worst[64, 6][2]
    for (block, steps), (first, every, spent) in worst.items():
        size = f"block {block:3d} x {steps:2d} steps"
        print(f"  {size}: first 32 {first:.0e}, all 128 {every:.0e}, processor time x{spent / unit:.2f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small n")
    parser.add_argument("--trade", action="store_true", help="block width against steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--n", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        work(options.work, options.n, options.threads)
        return 0
    if options.trade:
        trade(1024 if options.quick else 3000, options.threads)
        return 0
    small, large = (1024, 2048) if options.quick else (4096, 16384)
    runs = interleaved(["matrix-free", "svdvals"], small, options.rounds, options.threads)
    report(small, runs, runs["svdvals"][0].values)
    names = ["matrix-free", "svd_lowrank(128, niter=2)", "svd_lowrank(256, niter=4)"]
    runs = interleaved(names, large, options.rounds, options.threads)
    reference = measure("reference", large, options.threads)
    report(large, runs, reference.values)
    sure = (reference.errors / reference.values)[:32].amax().item()
    print(f"  (errors against 12 steps, whose own estimates for the first 32 values are below {sure:.0e})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
