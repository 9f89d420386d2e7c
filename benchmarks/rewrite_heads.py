"""The cost of running the heads of a layer in groups instead of all at once, and of each kind beside softmax.

    python -m benchmarks.rewrite_heads             12 heads of width 64, n = 512 and 4096
    python -m benchmarks.rewrite_heads --quick     n = 512

The first table forces heads of one kind into groups: neighbours and every second head (views), scattered heads
(gathered), each head alone.  Its entries are (time in groups) / (time at once): 1 is no overhead.  The second table
compares the kinds with torch's fused attention.  Calls alternate; medians, and half the interquartile range.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from headwise.bench.clock import in_turns
from headwise.replacement import KINDS, SOFTMAX, Choice, MixedHeads
from headwise.replacement.install.mixed_heads import HeadGroup

H, D = 12, 64
SPLITS: dict[str, list[Sequence[int]]] = {
    "at once": [range(H)],
    "2 runs": [range(H // 2), range(H // 2, H)],
    "3 runs": [range(4), range(4, 8), range(8, 12)],
    "2 even": [range(0, H, 2), range(1, H, 2)],
    "2 scattered": [(0, 1, 4, 6, 7, 11), (2, 3, 5, 8, 9, 10)],
    "3 scattered": [(0, 1, 6, 11), (2, 5, 7, 10), (3, 4, 8, 9)],
    "12 alone": [[i] for i in range(H)],
}


def split(choice: Choice, groups: list[Sequence[int]], n: int) -> MixedHeads:
    heads = MixedHeads([choice] * H, D, n)
    heads.groups = nn.ModuleList(HeadGroup(choice, members, D, n) for members in groups)
    return heads


def layer_inputs(n: int) -> list[torch.Tensor]:
    """q, k, v as a layer computes them: views (b, h, n, d) of (b, n, h d)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, H * D, generator=generator).unflatten(-1, (H, D)).transpose(1, 2) for _ in range(3)]


def splitting(n: int, choices: list[Choice], rounds: int) -> list[list[str]]:
    q, k, v = layer_inputs(n)
    rows = []
    for choice in choices:
        made = {name: split(choice, groups, n) for name, groups in SPLITS.items()}
        work = {name: lambda heads=heads: _merged(heads(q, k, v, scale=D**-0.5)) for name, heads in made.items()}
        times = in_turns(work, rounds=rounds)
        once = times["at once"]
        ratios = [f"{t.over(once):.2f} ± {t.spread / 2 / once.median:.2f}" for t in list(times.values())[1:]]
        rows.append([str(choice), f"{1e3 * once.median:.1f} ms", *ratios])
    return rows


def kinds(n: int, rounds: int) -> list[list[str]]:
    q, k, v = layer_inputs(n)
    made = {name: MixedHeads([Choice(name)] * H, D, n) for name in KINDS}
    work = {name: lambda heads=heads: _merged(heads(q, k, v, scale=D**-0.5)) for name, heads in made.items()}
    times = in_turns({"torch": lambda: _merged(F.scaled_dot_product_attention(q, k, v)), **work}, rounds=rounds)
    softmax = SOFTMAX.cost(n, D, False).multiply_adds
    rows = []
    for name in KINDS:
        share = Choice(name).cost(n, D, False).multiply_adds / softmax
        time = times[name]
        spread = time.spread / 2 / times["torch"].median
        rows.append([str(Choice(name)), f"{share:.3f}", f"{time.over(times['torch']):.3f} ± {spread:.3f}"])
    return rows


def _merged(out: torch.Tensor) -> torch.Tensor:
    """(b, n, h d), the input of the next linear layer."""
    return out.transpose(1, 2).flatten(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="n = 512 only")
    options = parser.parse_args()
    console = Console(width=140)
    choices = [SOFTMAX, Choice("window", {"width": 65, "leading": 1}), Choice("uniform")]
    with torch.no_grad():
        for n in (512,) if options.quick else (512, 4096):
            rounds = 21 if n <= 512 else 7
            _print(
                console,
                f"n = {n}: time in groups / at once",
                ["kind", "at once", *list(SPLITS)[1:]],
                splitting(n, choices, rounds),
            )
            _print(
                console,
                f"n = {n}: kinds",
                ["kind", "multiply-adds / softmax", "time / torch's attention"],
                kinds(n, rounds),
            )


def _print(console: Console, title: str, headings: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
