"""Measurements in a process of their own: `python -m headwise.bench.worker WHAT JSON`.

    times    '{"jobs": [{"name": "window 128", "n": 4096}, ...]}': all of them in turns, so that a machine that is slow
             for a minute slows all lengths alike
    memory   '{"name": "window 128", "n": 4096}': the peak of one; a fresh process is the only way to know it

The answer is a line of JSON for each job.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headwise.bench.cases import RECURRENT, Build, entry, factored_with
from headwise.bench.clock import in_turns
from headwise.cost import Cost
from headwise.nn.recurrent import Recurrent

Call = Callable[[], object]


def times(jobs: Sequence[dict[str, Any]], *, rounds: int = 5, seconds: float = 60.0) -> list[dict[str, float]]:
    """Seconds of each job, median and spread, forward and forward with backward; operations and depth."""
    made = [calls(**job) for job in jobs]
    forward = in_turns({str(i): x[0] for i, x in enumerate(made)}, rounds=rounds, seconds=seconds)
    both = in_turns({str(i): x[1] for i, x in enumerate(made)}, rounds=rounds, seconds=2 * seconds)
    return [
        {
            "forward": forward[str(i)].median,
            "forward_spread": forward[str(i)].spread,
            "both": both[str(i)].median,
            "both_spread": both[str(i)].spread,
            "multiply_adds": cost.multiply_adds,
            "depth": cost.depth,
        }
        for i, (_, _, cost) in enumerate(made)
    ]


def memory(job: dict[str, Any]) -> dict[str, float]:
    """Peak megabytes beyond what the process held before, forward and forward with backward."""
    forward, both, _ = calls(**job)
    before = _peak()
    forward()
    after = _peak()
    both()
    return {"forward_mb": after - before, "both_mb": _peak() - before}


def calls(name: str, n: int, rank: int | None = None, heads: int = 8, width: int = 64) -> tuple[Call, Call, Cost]:
    """Forward, forward and backward, and what they cost by count."""
    torch.manual_seed(0)
    if name == RECURRENT:
        layer = Recurrent(heads * width, causal=True)
        x = torch.randn(1, n, heads * width, requires_grad=True)
        wanted, run, cost = (x, *layer.parameters()), lambda: layer(x), layer.cost(n)
        pull = torch.randn(1, n, heads * width)
    else:
        build = entry(name).build(n) if rank is None else factored_with(name.removeprefix("factored "), rank, n)
        q, k, v = (torch.randn(1, n, heads, width).transpose(1, 2).requires_grad_() for _ in range(3))
        wanted, run, cost = (q, k, v), _attention(build, q, k, v), build(q.detach(), k.detach()).cost(width)
        pull = torch.randn(1, n, heads, width).transpose(1, 2)

    def forward() -> None:
        with torch.no_grad():
            run()

    return forward, lambda: torch.autograd.grad(run(), wanted, pull), cost


def _attention(build: Build, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: build(q, k)(v)


def _peak() -> float:
    """Megabytes; Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


if __name__ == "__main__":
    what, given = sys.argv[1], json.loads(sys.argv[2])
    for found in times(**given) if what == "times" else [memory(given)]:
        sys.stdout.write(json.dumps(found) + "\n")
