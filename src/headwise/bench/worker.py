"""Measurements in a process of their own: `python -P -m headwise.bench.worker WHAT JSON`.

    times    '{"jobs": [{"name": "window 128", "n": 4096}, ...]}': all of them in turns, so that a machine that is slow
             for a minute slows all lengths alike
    memory   '{"name": "window 128", "n": 4096}': the peak of one; only a fresh process can measure it

Prints a line of JSON for each job.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headwise.bench.cases import CASES, RECURRENT, factored_with
from headwise.bench.clock import Call, forward_and_backward, times_in_turns
from headwise.cost import Cost
from headwise.nn.recurrent import Recurrent
from headwise.random_state import seeded


def times(jobs: Sequence[dict[str, Any]], *, rounds: int = 5, seconds: float = 60.0) -> list[dict[str, float]]:
    """Seconds of each job, median and spread, with and without backward; counted operations and depth."""
    made = [calls(**job) for job in jobs]
    measured = times_in_turns({str(i): x[0] for i, x in enumerate(made)}, rounds=rounds, seconds=seconds)
    return [
        {
            "forward": x.forward.median,
            "forward_spread": x.forward.spread,
            "forward_backward": x.forward_backward.median,
            "forward_backward_spread": x.forward_backward.spread,
            "multiply_adds": cost.multiply_adds,
            "depth": cost.depth,
        }
        for x, (_, cost) in zip(measured.values(), made, strict=True)
    ]


def memory(job: dict[str, Any]) -> dict[str, float]:
    """Peak megabytes beyond what the process held before, with and without backward."""
    (forward, backward), _ = calls(**job)
    before = _peak()
    forward()
    after = _peak()
    backward()
    return {"forward_mb": after - before, "forward_backward_mb": _peak() - before}


def calls(
    name: str, n: int, rank: int | None = None, heads: int = 8, width: int = 64
) -> tuple[tuple[Call, Call], Cost]:
    """The forward and the forward and backward call of a job, and their counted cost."""
    generator = torch.Generator().manual_seed(0)
    if name == RECURRENT:
        with seeded(0):
            layer = Recurrent(heads * width, causal=True)
        x = torch.randn(1, n, heads * width, generator=generator, requires_grad=True)
        gradient = torch.randn(1, n, heads * width, generator=generator)
        return forward_and_backward(lambda: layer(x), (x, *layer.parameters()), gradient), layer.cost(n)
    build = CASES[name].build(n) if rank is None else factored_with(name.removeprefix("factored "), rank, n)
    *qkv, gradient = (torch.randn(1, n, heads, width, generator=generator).transpose(1, 2) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in qkv)
    run = forward_and_backward(lambda: build(q, k)(v), (q, k, v), gradient)
    return run, build(q.detach(), k.detach()).cost(width)


def _peak() -> float:
    """Megabytes; Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


if __name__ == "__main__":
    what, arguments = sys.argv[1], json.loads(sys.argv[2])
    for result in times(**arguments) if what == "times" else [memory(arguments)]:
        sys.stdout.write(json.dumps(result) + "\n")
