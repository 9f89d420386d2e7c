"""Do the singular values of attention have a long tail?  Trained heads beside random ones (Verma's Figure 1).

    python -m benchmarks.long_tail [--models minilm smollm2] [--length 512] [--figure FILE]

For every head of a trained model on one text, in float64, from the whole SVD of P:

    energy    sum of the r largest squares of singular values over the sum of all: median over heads, 10 and 90 %
    output    ||(P - P_r) V||_F / ||P V||_F, P_r the best approximation of rank r, V the head's own values
    sketch    the same for P R'R, R of r x n with N(0, 1/r) entries, as in the proof: the median of its root mean square
    within    share of heads whose output is within 10 % at rank r

"random" are 72 heads of the shape of MiniLM's with Gaussian queries, keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from headwise.cli.tables import print_table
from headwise.models import load_model
from headwise.models.inputs import text_input
from headwise.models.intercept import AttentionCall, intercept
from headwise.models.run import as_it_was, run_model
from headwise.operators import softmax
from headwise.operators.base import AttentionOperator

RANKS = (8, 32, 64, 128)


@final
@dataclass(frozen=True)
class Tails:
    """One row a head; columns are ranks 1 … n for the energy and RANKS for the errors."""

    energy: Tensor  # (heads, n)
    output: Tensor  # (heads, ranks)
    sketch: Tensor  # (heads, ranks)


def tails(p: AttentionOperator, v: Tensor) -> Tails:
    """Of the heads of P (*batch, n, n) and their values (*batch, n, d)."""
    dense, v = p.dense().double().flatten(0, -3), v.double().flatten(0, -3)
    u, s, vh = torch.linalg.svd(dense)
    squares, whole = s.square(), dense @ v
    size = whole.norm(dim=(-2, -1))
    output, sketch = [], []
    for r in RANKS:
        low = (u[..., :r] * s[..., None, :r]) @ (vh[..., :r, :] @ v)
        output.append((whole - low).norm(dim=(-2, -1)) / size)
        # E ||P R'R w - P w||^2 = (||P||_F^2 ||w||^2 + ||P w||^2) / r, summed over the columns of V
        mean = (squares.sum(-1) * v.square().sum((-2, -1)) + size.square()) / r
        sketch.append(mean.sqrt() / size)
    return Tails(squares.cumsum(-1) / squares.sum(-1, keepdim=True), torch.stack(output, -1), torch.stack(sketch, -1))


def joined(parts: Sequence[Tails]) -> Tails:
    return Tails(*(torch.cat([getattr(part, name) for part in parts]) for name in ("energy", "output", "sketch")))


def of_model(name: str, length: int) -> Tails:
    loaded = load_model(name)
    batch = text_input(loaded, None, length=length, texts=1).batches[0]
    parts: list[Tails] = []

    def see(call: AttentionCall) -> None:
        p = softmax(call.q, call.k, scale=call.scale, causal=call.causal)  # one text, so no padding
        parts.append(tails(p, call.v))

    with as_it_was(loaded.model), torch.no_grad(), intercept(loaded.model, see):
        run_model(loaded.model, batch)
    return joined(parts)


def of_random(length: int, *, heads: int = 72, width: int = 32) -> Tails:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(heads):
        q, k, v = torch.randn(3, 1, length, width, generator=generator).unbind(0)
        parts.append(tails(softmax(q, k), v))
    return joined(parts)


def draw(results: dict[str, Tails], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    ax = figure.subplots()
    for i, (name, x) in enumerate(results.items()):
        low, middle, high = x.energy.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=x.energy.dtype), dim=0)
        ranks = range(1, len(middle) + 1)
        ax.plot(ranks, middle, color=f"C{i}", label=f"{name}, {len(x.energy)} heads")
        ax.fill_between(ranks, low, high, color=f"C{i}", alpha=0.15, lw=0)
    n = next(iter(results.values())).energy.shape[-1]
    ax.set(xscale="log", xlim=(1, n), ylim=(0, 1.02), xlabel="rank r", ylabel="energy of the r largest singular values")
    ax.set_title(f"P at {n} tokens: median over heads, 10 to 90 % shaded", fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["minilm", "smollm2"], metavar="MODEL")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--figure", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    results = {name: of_model(name, options.length) for name in options.models}
    results["random"] = of_random(options.length)
    rows = []
    for name, x in results.items():
        for i, r in enumerate(RANKS):
            energy, error = x.energy[:, r - 1], x.output[:, i]
            low, middle, high = (float(energy.quantile(share)) for share in (0.1, 0.5, 0.9))
            rows.append(
                [
                    f"{name} ({len(error)})" if i == 0 else "",
                    str(r),
                    f"{middle:.3f} ({low:.2f} … {high:.2f})",
                    f"{float(error.median()):.3f}",
                    f"{float(x.sketch[:, i].median()):.1f}",
                    f"{float((error < 0.1).float().mean()):.0%}",
                ]
            )
    title = f"Singular values of P at {options.length} tokens, one text"
    print_table(title, ["heads", "r", "energy (10 … 90 %)", "output", "sketch", "within 10 %"], rows)
    if options.figure is not None:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
