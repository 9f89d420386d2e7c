"""Activation memory and time of a training step against depth, with and without `reversible`.

    python -m benchmarks.reversible [--quick]

Width 128, 4 heads, window 128, 4096 tokens (--quick: 1024).  Memory is the peak of a separate process minus what it
held before its first step and minus the gradients of the weights, which grow with depth in any case.  glibc is set to
return large blocks at once, so that fragmentation is not counted.  Time is the minimum of three steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from headwise.nn import Encoder
from headwise.operators import window

WIDTH, HEADS, DEPTHS = 128, 4, (2, 4, 8, 16, 32)


def measure(depth: int, n: int, reversible: bool) -> dict[str, float]:
    """Megabytes and seconds of a forward and backward pass."""
    torch.manual_seed(0)
    model = Encoder(WIDTH, HEADS, depth, build=partial(window, width=128), reversible=reversible)
    x = torch.randn(1, n, WIDTH)
    before, seconds = _peak(), []
    for _ in range(3):
        model.zero_grad()
        start = time.perf_counter()
        model(x).square().sum().backward()
        seconds.append(time.perf_counter() - start)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters()) / (1 << 20)
    return {"mb": _peak() - before - gradients, "seconds": min(seconds)}


def _peak() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


def _measure_in_subprocess(depth: int, n: int, reversible: bool) -> dict[str, float]:
    job = json.dumps([depth, n, reversible])
    command = [sys.executable, "-m", "benchmarks.reversible", "--job", job]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(*json.loads(options.job))))
        return
    n = 1024 if options.quick else 4096
    table = Table(title=f"Encoder, width {WIDTH}, window 128, n = {n}", title_justify="left")
    for heading in ("depth", "plain MB", "reversible MB", "plain s", "reversible s", "time ratio"):
        table.add_column(heading, justify="right")
    megabytes: dict[bool, list[float]] = {False: [], True: []}
    for depth in DEPTHS[:4] if options.quick else DEPTHS:
        plain, other = (_measure_in_subprocess(depth, n, reversible) for reversible in (False, True))
        megabytes[False].append(plain["mb"])
        megabytes[True].append(other["mb"])
        ratio = other["seconds"] / plain["seconds"]
        cells = (plain["mb"], other["mb"], plain["seconds"], other["seconds"], ratio)
        table.add_row(str(depth), *(f"{x:.1f}" if i < 2 else f"{x:.2f}" for i, x in enumerate(cells)))
    console = Console()
    console.print(table)
    layers = DEPTHS[len(megabytes[True]) - 1] - DEPTHS[0]
    slopes = {name: (values[-1] - values[0]) / layers for name, values in megabytes.items()}
    console.print(f"megabytes per additional layer: plain {slopes[False]:.2f}, reversible {slopes[True]:.2f}")


if __name__ == "__main__":
    main()
