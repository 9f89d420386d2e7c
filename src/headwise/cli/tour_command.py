"""`headwise tour`: three attention operators with their spectra and costs, three symmetries, and one picture.

The operators are the extremes of what attention can be, the mean (rank one) and the shift (orthogonal, no arithmetic),
and between them a softmax in which tokens on a grid attend to their surroundings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.options import Parser, add_force, file_path, whole_number
from headwise.cli.tables import print_table
from headwise.errors import check_extra, needs_extra
from headwise.output_directory import OutputDirectory
from headwise.outputs import json_text

if TYPE_CHECKING:
    from headwise.operators import AttentionOperator
    from headwise.theory import SymmetryReport

D = 64
"""Value width for which costs are stated."""


@dataclass(frozen=True, eq=False)
class MeasuredOperator:
    """One operator of the tour, with its spectrum, cost and claims."""

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
    parser = Parser(
        prog="headwise tour",
        description="Three attention operators with their spectra and costs, three symmetries, and one picture.",
    )
    parser.add_argument(
        "--side", type=whole_number(4, 48), default=16, metavar="G", help="tokens lie on a G x G grid (default 16)"
    )
    parser.add_argument("--out", type=file_path, metavar="DIR", help="also draw DIR/tour.png")
    add_force(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)

    picture = None
    if options.out is None:
        operators, symmetries = measure_operators(options.side), check_symmetries(options.side)
    else:
        check_extra("report", "the picture", "matplotlib")
        with OutputDirectory(options.out, command="tour", names=["tour.png"], force=options.force) as out:
            operators, symmetries = measure_operators(options.side), check_symmetries(options.side)
            with out.atomic("tour.png") as path:
                draw(operators, options.side, path)
            picture = out.path / "tour.png"
    if options.json:
        facts = {
            "n": options.side**2,
            "operators": [measured.to_json() for measured in operators],
            "symmetries": [report.to_json() for _, report in symmetries],
            "picture": None if picture is None else str(picture),
        }
        print(json_text(facts, indent=2))
        return 0
    _print_operators(operators)
    _print_symmetries(symmetries)
    if picture is not None:
        print(f"picture: {picture}")
    return 0


def measure_operators(g: int) -> list[MeasuredOperator]:
    """The three operators on the n = g^2 tokens of a grid, in float64."""
    import torch

    from headwise.linalg.ranks import effective_rank
    from headwise.operators import shift, softmax, uniform

    n = g * g
    generator = torch.Generator().manual_seed(0)
    positions = torch.cartesian_prod(torch.arange(g), torch.arange(g)).double()
    # random Fourier features: q.k falls off with distance like a Gaussian whose width is a fifth of the grid
    angles = positions @ (torch.randn(2, 32, generator=generator, dtype=torch.float64) * 5 / g)
    x = torch.cat([angles.cos(), angles.sin()], dim=-1)
    measured = []
    for name, formula, operator in (
        ("uniform", "1 1ᵀ / n", uniform(n, n)),
        ("softmax", "softmax(s q kᵀ)", softmax(x, x, scale=0.2)),
        ("shift", "one cell to the right", shift((g, g), (0, 1))),
    ):
        spectrum = operator.spectrum(n)
        rank, work = effective_rank(spectrum).item(), operator.cost(D).multiply_adds
        claims = sorted(claim.name.lower() for claim in operator.claims)
        measured.append(MeasuredOperator(name, formula, operator, spectrum.values.tolist(), rank, work, claims))
    return measured


def check_symmetries(g: int) -> list[tuple[str, SymmetryReport]]:
    """Self-attention commutes with every permutation of its tokens; a convolution only with shifts, off the border."""
    import torch

    from headwise.nn import MultiHead
    from headwise.random_state import seeded
    from headwise.theory import check_equivariance, permutations, translations

    with seeded(0):
        attention, convolution = MultiHead(32, 4).eval(), torch.nn.Conv2d(4, 4, 3, padding=1).eval()
        tokens, image = torch.randn(1, g * g, 32), torch.randn(1, 4, g, g)
    return [
        ("self-attention", check_equivariance(attention, permutations(), tokens)),
        ("convolution 3×3", check_equivariance(convolution, permutations(), image, axes="grid")),
        ("convolution 3×3", check_equivariance(convolution, translations(), image, axes="grid")),
    ]


def _print_operators(operators: list[MeasuredOperator]) -> None:
    columns = {"σ₁": 0, "σ₂": 1, "σ₁₆": 15}
    headings = ("operator", *columns, "effective\nrank", f"multiply-adds\nfor d = {D}", "claims")
    rows = [
        (
            measured.name,
            *(f"{abs(measured.singular_values[i]):.2f}" for i in columns.values()),
            f"{measured.effective_rank:.1f}",
            f"{measured.multiply_adds:,}",
            ", ".join(claim for claim in measured.claims if claim != "nonnegative"),  # implied by stochastic
        )
        for measured in operators
    ]
    title = f"Three attention operators on {operators[0].operator.shape[-1]} tokens"
    print_table(title, headings, rows, words=("operator", "claims"), no_wrap=("operator",))


def _print_symmetries(symmetries: list[tuple[str, SymmetryReport]]) -> None:
    rows = [(layer, report.group, f"{report.worst.relative:.1g}", report.verdict.value) for layer, report in symmetries]
    title = "Does the layer commute with a rearrangement of the tokens?"
    headings = ("layer", "rearrangement", "relative error", "verdict")
    print_table(title, headings, rows, words=("layer", "rearrangement", "verdict"))


def draw(operators: list[MeasuredOperator], g: int, path: Path) -> None:
    """Each P as an image, and the three spectra in one plot."""
    with needs_extra("report", "the picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.5), dpi=100, layout="constrained")
    *maps, curves = figure.subplots(1, len(operators) + 1, width_ratios=[1, 1, 1, 1.35])
    rows = 4 * g  # four rows of the grid; all of P would be too fine
    for axes, measured, color in zip(maps, operators, ("#4477aa", "#cc6677", "#228833"), strict=True):
        p = measured.operator.dense()[:rows, :rows].numpy(force=True)
        # the root brightens small weights, which are most of a softmax
        axes.imshow((p / p.max()) ** 0.5, cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"{measured.name}\n{measured.formula}", color=color)
        axes.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
        values = measured.singular_values
        curves.plot(range(1, len(values) + 1), values, color=color, label=measured.name)
    curves.set(xscale="log", yscale="log", ylim=(1e-4, 4), xlabel="i", title="singular values σᵢ\nof each")
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(path)
