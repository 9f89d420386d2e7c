"""`headwise tour`: three operators with their spectra and costs, three symmetry verdicts, and one picture.

The operators stand at the corners of what attention can be: the mean (rank one), the shift (orthogonal, no arithmetic
at all), and a softmax between them, in which tokens on a grid look at their surroundings.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from headwise.operators import AttentionOperator
    from headwise.theory import SymmetryReport

D = 64
"""Value width for which costs are stated."""


@dataclass(frozen=True, eq=False)
class Stop:
    """One operator of the tour and what was measured of it."""

    name: str
    formula: str
    operator: AttentionOperator
    singular_values: list[float]
    effective_rank: float
    multiply_adds: int
    claims: list[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "formula": self.formula,
            "shape": list(self.operator.shape),
            "singular_values": self.singular_values[:32],
            "effective_rank": self.effective_rank,
            "multiply_adds": self.multiply_adds,
            "claims": self.claims,
        }


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="headwise tour",
        description="Three attention operators with their spectra and costs, three symmetry verdicts, one picture.",
    )
    parser.add_argument("--side", type=int, default=16, metavar="G", help="tokens lie on a G x G grid (default 16)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also draw DIR/tour.png")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    options = parser.parse_args(argv)
    if not 4 <= options.side <= 48:
        raise InputError(f"--side must lie between 4 and 48, but is {options.side}")

    stops, symmetries = visit(options.side), symmetries_of_layers(options.side)
    picture = None if options.out is None else draw(stops, options.side, options.out)
    if options.json:
        facts = {
            "n": options.side**2,
            "operators": [stop.to_json() for stop in stops],
            "symmetries": [report.to_json() for _, report in symmetries],
            "picture": None if picture is None else str(picture),
        }
        print(json.dumps(facts, indent=2))
        return 0
    from rich.console import Console

    console = Console()
    console.print(table_of_operators(stops))
    console.print(table_of_symmetries(symmetries))
    if picture is not None:
        print(f"picture: {picture}")
    return 0


def visit(g: int) -> list[Stop]:
    """The three operators on the n = g^2 tokens of a grid, in float64."""
    import torch

    from headwise.operators.relative.shift import shift
    from headwise.operators.softmax import softmax
    from headwise.operators.uniform import uniform

    n = g * g
    generator = torch.Generator().manual_seed(0)
    place = torch.cartesian_prod(torch.arange(g), torch.arange(g)).double()
    # random Fourier features: q.k falls off with distance like a Gaussian whose width is a fifth of the grid
    frequencies = torch.randn(2, 32, generator=generator, dtype=torch.float64) * 5 / g
    angles = place @ frequencies
    x = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return [
        measure("uniform", "1 1ᵀ / n", uniform(n, n)),
        measure("softmax", "softmax(s q kᵀ)", softmax(x, x, scale=0.2)),
        measure("shift", "one cell to the right", shift((g, g), (0, 1))),
    ]


def measure(name: str, formula: str, operator: AttentionOperator) -> Stop:
    from headwise.linalg.ranks import effective_rank

    spectrum = operator.spectrum(operator.shape[-1])
    return Stop(
        name=name,
        formula=formula,
        operator=operator,
        singular_values=spectrum.values.tolist(),
        effective_rank=effective_rank(spectrum).item(),
        multiply_adds=operator.cost(D).multiply_adds,
        claims=sorted(claim.name.lower() for claim in operator.claims),
    )


def symmetries_of_layers(g: int) -> list[tuple[str, SymmetryReport]]:
    """Self-attention commutes with every permutation of its tokens; a convolution only with shifts, off the border."""
    import torch

    from headwise.nn import MultiHead
    from headwise.theory import check_equivariance, permutations, translations

    torch.manual_seed(0)
    attention, convolution = MultiHead(32, 4).eval(), torch.nn.Conv2d(4, 4, 3, padding=1).eval()
    tokens, image = torch.randn(1, g * g, 32), torch.randn(1, 4, g, g)
    return [
        ("self-attention", check_equivariance(attention, permutations(), tokens)),
        ("convolution 3×3", check_equivariance(convolution, permutations(), image, axes="grid")),
        ("convolution 3×3", check_equivariance(convolution, translations(), image, axes="grid")),
    ]


def table_of_operators(stops: list[Stop]) -> Table:
    shown = {"σ₁": 0, "σ₂": 1, "σ₄": 3, "σ₁₆": 15}
    table = _table(f"Three attention operators on {stops[0].operator.shape[-1]} tokens")
    table.add_column("operator", no_wrap=True)
    for name in (*shown, "effective\nrank", f"multiply-adds\nfor d = {D}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("claims")
    for stop in stops:
        values = (f"{abs(stop.singular_values[i]):.2f}" for i in shown.values())
        claims = ", ".join(claim for claim in stop.claims if claim != "nonnegative")  # stochastic says it already
        rank, work = f"{stop.effective_rank:.1f}", f"{stop.multiply_adds:,}"
        table.add_row(stop.name, *values, rank, work, claims)
    return table


def table_of_symmetries(symmetries: list[tuple[str, SymmetryReport]]) -> Table:
    table = _table("Does moving the tokens first or last make a difference?")
    for name in ("layer", "moved by"):
        table.add_column(name)
    table.add_column("relative error", justify="right")
    table.add_column("verdict")
    for layer, report in symmetries:
        table.add_row(layer, report.group, f"{report.worst.relative:.1g}", report.verdict.value)
    return table


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def draw(stops: list[Stop], g: int, folder: Path) -> Path:
    """Each P as a picture, and the three spectra in one plot."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("--out needs matplotlib; install it with: pip install 'headwise[report]'") from error

    figure = Figure(figsize=(13, 3.5), dpi=100, layout="constrained")
    *maps, curves = figure.subplots(1, len(stops) + 1, width_ratios=[1, 1, 1, 1.35])
    colors = ("#4477aa", "#cc6677", "#228833")
    rows = 4 * g  # four rows of the grid: all of P would be too fine to see
    for axes, stop, color in zip(maps, stops, colors, strict=True):
        p = stop.operator.dense()[:rows, :rows].numpy(force=True)
        # the root brightens small weights, which are most of a softmax
        axes.imshow((p / p.max()) ** 0.5, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"{stop.name}\n{stop.formula}", color=color)
        axes.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
        curves.plot(range(1, len(stop.singular_values) + 1), stop.singular_values, color=color, label=stop.name)
    curves.set(xscale="log", yscale="log", ylim=(1e-4, 4), xlabel="i", title="singular values σᵢ\nof each")
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    path = folder / "tour.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure).print_png(path)
    except OSError as error:
        raise InputError(f"--out {folder}: the picture cannot be written there: {error.strerror}") from error
    return path
