"""Measurements in a process of their own: `python -m headwise.bench.worker '[{"name": "window 128", "n": 4096}]'`.

The answer is a line of JSON for each.  A fresh process is the only way to know a peak of memory: the peak of one that
has measured something else before may be the other's, so only the first line of a process tells it.
"""

from __future__ import annotations

import json
import resource
import sys

import torch

from headwise.bench.cases import RECURRENT, Build, entry, factored_with
from headwise.bench.clock import in_turns
from headwise.nn.recurrent import Recurrent


def measure(
    name: str,
    n: int,
    *,
    heads: int = 8,
    width: int = 64,
    rank: int | None = None,
    rounds: int = 5,
    seconds: float = 20.0,
) -> dict[str, float]:
    """Seconds (median, spread) and peak extra megabytes, forward and forward with backward; operations and depth."""
    torch.manual_seed(0)
    if name == RECURRENT:
        layer = Recurrent(heads * width, causal=True)
        x = torch.randn(1, n, heads * width, requires_grad=True)
        wanted, run, cost = (x, *layer.parameters()), lambda: layer(x), layer.cost(n)
    else:
        build = entry(name).build(n) if rank is None else factored_with(name.removeprefix("factored "), rank, n)
        q, k, v = (torch.randn(1, n, heads, width).transpose(1, 2).requires_grad_() for _ in range(3))
        wanted, run, cost = (q, k, v), _attention(build, q, k, v), build(q.detach(), k.detach()).cost(width)
    pull = torch.randn(1, n, heads * width)
    if name != RECURRENT:
        pull = pull.unflatten(-1, (heads, width)).transpose(1, 2)

    def forward() -> None:
        with torch.no_grad():
            run()

    def both() -> None:
        torch.autograd.grad(run(), wanted, pull)

    before = _peak()
    forwards = in_turns({"f": forward}, rounds=rounds, seconds=seconds)["f"]
    after_forward = _peak()
    boths = in_turns({"b": both}, rounds=rounds, seconds=seconds)["b"]
    return {
        "forward": forwards.median,
        "forward_spread": forwards.spread,
        "both": boths.median,
        "both_spread": boths.spread,
        "forward_mb": after_forward - before,
        "both_mb": _peak() - before,
        "multiply_adds": cost.multiply_adds,
        "depth": cost.depth,
    }


def _attention(build: Build, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return lambda: build(q, k)(v)


def _peak() -> float:
    """Megabytes; Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(measure(**job)) + "\n")
        sys.stdout.flush()
