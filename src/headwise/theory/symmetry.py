"""Is A(g x) = g A(x)?  Measured, together with the rounding error of the module.

Self-attention is permutation EQUIVARIANT, A(Px) = P A(x); attention with learned queries is permutation INVARIANT,
A(Px) = A(x).  A 1x1 convolution is equivariant; a wider one is not, but commutes with translations away from the
border.  Positional encodings break the symmetry.  `check_equivariance` measures this by running the module.

Rounding.  An identity that holds in exact arithmetic fails in floating point by C * eps with about the same C in every
precision; a broken one fails by the same amount in every precision.  So the module runs in the given dtype and in
float64 (`headwise.theory.rounding`): C is the largest difference between the two runs over eps, and in float64 an error
above SAFETY * C * eps is real.  The two cases are nine orders of magnitude apart.  Where parts of the module stay in a
coarser dtype (a norm that casts to float32), that dtype's eps is used.

Border.  Zero padding breaks translation symmetry only near the edges of the grid and near the seam, the former edge
which a roll moves inside.  Positions on an edge or seam of the axes that g moves have depth 0.  The verdict is BORDER
ONLY when the depths with real errors are exactly 0 ... w-1 and some g moves positions of depth >= w.  So the width w is
measured (2 for a 5x5 kernel), a grid without interior never passes, nor does a defect amid correct positions, and the
middle row of a flip, which does not move, is no evidence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from headwise.errors import InputError, NonFiniteError, ShapeError
from headwise.theory.groups import Element, SymmetryGroup
from headwise.theory.rounding import Forward, module_name, run_in_two_precisions
from headwise.theory.verdict import Verdict

Axes = Literal["tokens", "grid"] | Sequence[int]


class Symmetry(Enum):
    EXACT = "EXACT"
    """Bit for bit in the given dtype."""
    ROUNDING = "ROUNDING"
    """True in exact arithmetic: the error shrinks with eps."""
    BORDER_ONLY = "BORDER ONLY"
    """True away from the edges."""
    APPROXIMATE = "APPROXIMATE"
    """False, with a relative error within the tolerance."""
    BROKEN = "BROKEN"


@final
@dataclass(frozen=True)
class RegionError:
    """||e|| / ||g A(x)|| and max |e| over the positions of a region."""

    relative: float
    maximal: float


@final
@dataclass(frozen=True)
class Regions:
    """Errors by region; None for an empty one (permutations have no border)."""

    whole: RegionError
    interior: RegionError | None
    border: RegionError | None


@final
@dataclass(frozen=True)
class ElementReport:
    """The errors of one group element, in the given dtype and in float64."""

    name: str
    given: Regions
    float64: Regions

    @property
    def relative(self) -> float:
        """||A(g x) - g A(x)|| / ||A(x)|| in float64."""
        return self.float64.whole.relative

    @property
    def maximal(self) -> float:
        """max |A(g x) - g A(x)| in float64."""
        return self.float64.whole.maximal


@final
@dataclass(frozen=True)
class SymmetryReport:
    """The verdict, and the measurements it follows from.

    `scale`         max |A(x)|, in float64
    `floor`         largest difference between the two precisions, relative to the scale
    `threshold`     an error above threshold * scale in float64 is real, not rounding
    `border_width`  0 if no error is real, w if the real ones lie within w steps of an edge, otherwise None
    """

    relation: str
    module: str
    group: str
    dtype: str
    verdict: Symmetry
    elements: tuple[ElementReport, ...]
    scale: float
    floor: float
    threshold: float
    border_width: int | None
    tolerance: float
    training: bool
    deterministic: bool
    moved: bool
    notes: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.verdict in (Symmetry.EXACT, Symmetry.ROUNDING)

    @property
    def worst(self) -> ElementReport:
        return max(self.elements, key=lambda element: element.relative)

    def to_verdict(self) -> Verdict:
        """The claim that no error is above the threshold, with the premises under which it can be decided."""
        return Verdict(
            claim=f"{self.module}: {self.relation} under {self.group}",
            source="Ji & Xie, invariance and equivariance",
            measured=max(element.maximal for element in self.elements) / (self.scale or 1.0),
            bound=self.threshold,
            premises={
                "the module is in eval mode": not self.training,
                "two runs on one input agree": self.deterministic,
                "every element moves the input": self.moved,
            },
        )

    def to_json(self) -> dict[str, Any]:
        """A dict for `outputs.json_text`."""
        return {**asdict(self), "verdict": self.verdict.value, "worst": self.worst.name}

    def __str__(self) -> str:
        border = f", border {self.border_width} wide" if self.verdict is Symmetry.BORDER_ONLY else ""
        line = (
            f"{self.module}: {self.relation} under {self.group}: {self.verdict.value}{border}; "
            f"worst {self.worst.name}, relative error {self.worst.relative:.2g} in float64; "
            f"rounding floor of {self.dtype} {self.floor:.2g}"
        )
        return "\n".join((line, *(f"  note: {note}" for note in self.notes)))


def check_equivariance(
    module: Callable[..., Any],
    group: SymmetryGroup,
    x: Tensor,
    *,
    axes: Axes = "tokens",
    out_axes: Axes | None = None,
    call: Forward | None = None,
    tolerance: float = 1e-2,
) -> SymmetryReport:
    """||A(g x) - g A(x)|| for the elements g of `group`, and a verdict.

    `axes`       axes on which the group acts: "tokens" for (*batch, n, d) or integer ids (*batch, n), "grid" for
                 (b, c, *grid), or a tuple of axes; `out_axes` are those of the output where they differ
    `call`       call(module, x) runs the module, by default module(x)
    `tolerance`  relative error up to which a broken symmetry is called APPROXIMATE

    The module is copied, not changed.  x should be random, since a constant x has every symmetry.

    >>> from headwise.theory import permutations
    >>> pointwise, wide, x = nn.Conv1d(3, 3, 1).eval(), nn.Conv1d(3, 3, 3, padding=1).eval(), torch.randn(2, 3, 10)
    >>> check_equivariance(pointwise, permutations(), x, axes="grid").holds
    True
    >>> check_equivariance(wide, permutations(), x, axes="grid").verdict
    <Symmetry.BROKEN: 'BROKEN'>
    """
    return _check("equivariance", module, group, x, axes, axes if out_axes is None else out_axes, call, tolerance)


def check_invariance(
    module: Callable[..., Any],
    group: SymmetryGroup,
    x: Tensor,
    *,
    axes: Axes = "tokens",
    call: Forward | None = None,
    tolerance: float = 1e-2,
) -> SymmetryReport:
    """||A(g x) - A(x)|| for the elements g of `group`, and a verdict; arguments as in `check_equivariance`.

    >>> from headwise.theory import flips
    >>> check_invariance(lambda x: x.mean(-2), flips(), torch.randn(2, 10, 3)).holds
    True
    """
    return _check("invariance", module, group, x, axes, None, call, tolerance)


def _check(
    relation: str,
    module: Callable[..., Any],
    group: SymmetryGroup,
    x: Tensor,
    axes: Axes,
    out_axes: Axes | None,
    call: Forward | None,
    tolerance: float,
) -> SymmetryReport:
    x, notes = x.detach(), []
    if training := isinstance(module, nn.Module) and any(part.training for part in module.modules()):
        warnings.warn(
            f"{module_name(module)} is in training mode: dropout and batch statistics break symmetries; use .eval()",
            stacklevel=3,
        )
    in_axes = _resolve("x", axes, x, ids=not x.dtype.is_floating_point)
    elements = group.elements([x.shape[a] for a in in_axes])
    if torch.Size(x.shape[a] for a in in_axes).numel() < 2 or x.numel() == 0:
        raise ShapeError(f"{group.name}: x has shape {tuple(x.shape)}, with a single position along axes {in_axes}")
    if x.dtype.is_floating_point and not bool(x.isfinite().all()):
        raise NonFiniteError(f"check_{relation}: x has {int((~x.isfinite()).sum())} non-finite of {x.numel()} entries")
    inputs = [x, *(element.act(x, in_axes) for element in elements)]
    unmoved = [e.name for e, gx in zip(elements, inputs[1:], strict=True) if torch.equal(gx, x)]
    if unmoved:
        notes.append(f"x is unchanged by {', '.join(unmoved)}, which therefore test nothing; use a random x")
    if training:
        notes.append("the module is in training mode; the verdict applies to training mode")

    runs = run_in_two_precisions(module, call, inputs)
    notes.extend(runs.notes)
    errors, errors64 = (_errors(elements, x, axes, out_axes, outputs) for outputs in (runs.given, runs.float64))
    limit = runs.threshold * runs.scale
    real = any(bool((error.size > limit).any()) for error in errors64)
    width = _border_width(errors64, limit)
    reports = tuple(
        ElementReport(element.name, e.regions(width), e64.regions(width))
        for element, e, e64 in zip(elements, errors, errors64, strict=True)
    )
    if not real:
        same = all(report.given.whole.maximal == 0 for report in reports)
        verdict = Symmetry.EXACT if same else Symmetry.ROUNDING
    elif width is not None:
        verdict = Symmetry.BORDER_ONLY
    else:
        worst = max(report.relative for report in reports)
        verdict = Symmetry.APPROXIMATE if worst <= tolerance else Symmetry.BROKEN
    return SymmetryReport(
        relation=relation,
        module=module_name(module),
        group=group.name,
        dtype=str(runs.given[0].dtype).removeprefix("torch."),
        verdict=verdict,
        elements=reports,
        scale=runs.scale,
        floor=runs.floor,
        threshold=runs.threshold,
        border_width=width if real else 0,
        tolerance=tolerance,
        training=training,
        deterministic=runs.deterministic,
        moved=not unmoved,
        notes=tuple(notes),
    )


@final
@dataclass(frozen=True, eq=False)
class _Errors:
    """|A(g x) - g A(x)| and g A(x) as (rest, positions), with the depth of every position."""

    gap: Tensor
    reference: Tensor
    depth: Tensor | None
    moved: Tensor | None  # False at positions that g does not move, such as the middle of a flip

    @property
    def size(self) -> Tensor:
        """The largest gap at each position."""
        return self.gap.amax(0)

    def regions(self, width: int | None) -> Regions:
        """Errors by region, for a border of `width`; where none was measured, of a quarter of the depth."""
        whole = self._error(slice(None))
        if self.depth is None:
            return Regions(whole, whole, None)
        inside = self.depth >= (width or max(1, (int(self.depth.max()) + 1) // 4))
        interior = self._error(inside) if bool(inside.any()) else None
        return Regions(whole, interior, None if bool(inside.all()) else self._error(~inside))

    def _error(self, where: Tensor | slice) -> RegionError:
        gap, norm = self.gap[:, where], self.reference[:, where].norm().item()
        size = gap.norm().item()
        return RegionError(size / norm if norm else (0.0 if size == 0 else float("inf")), gap.amax().item())


def _errors(
    elements: list[Element], x: Tensor, axes: Axes, out_axes: Axes | None, outputs: list[Tensor]
) -> list[_Errors]:
    """Compare A(x), the first of `outputs`, with A(g x) for every element g; without `out_axes`, g A(x) is A(x)."""
    y, *moved = (z.double() for z in outputs)
    pairs = zip(elements, moved, strict=True)
    if out_axes is None:
        return [_Errors(_gap(e, z, y).reshape(-1, 1), y.reshape(-1, 1), None, None) for e, z in pairs]
    expected = x.dim() + (0 if x.dtype.is_floating_point else 1)
    if isinstance(out_axes, str) and out_axes == axes and y.dim() != expected:
        raise ShapeError(
            f"check_equivariance: x has shape {tuple(x.shape)}, but the output {tuple(y.shape)}; "
            "give out_axes, or use check_invariance"
        )
    where = _resolve("the output", out_axes, y)
    return [_at_positions(element, z, y, where) for element, z in pairs]


def _at_positions(element: Element, a: Tensor, y: Tensor, where: tuple[int, ...]) -> _Errors:
    b = element.act_out(y, where)
    grid = [b.shape[axis] for axis in where]

    def flat(z: Tensor) -> Tensor:
        return z.movedim(where, tuple(range(-len(where), 0))).reshape(-1, math.prod(grid))

    gap = flat(_gap(element, a, b))
    if element.depth is None:
        return _Errors(gap, flat(b), None, None)
    positions = torch.arange(math.prod(grid), device=y.device)
    origin = element.act_out(positions.reshape([y.shape[axis] for axis in where]), range(len(where))).flatten()
    # the sides of a rotated grid that is not square differ, so that indices cannot be compared
    moved = origin != positions if all(y.shape[axis] == b.shape[axis] for axis in where) else positions >= 0
    return _Errors(gap, flat(b), element.depth(grid).flatten().to(y.device), moved)


def _gap(element: Element, a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise ShapeError(f"{element.name}: A(g x) has shape {tuple(a.shape)}, but g A(x) has {tuple(b.shape)}")
    return (a - b).abs()


def _border_width(errors: list[_Errors], limit: float) -> int | None:
    """w if the depths with real errors are 0 ... w-1 and some moved position is deeper; else None."""
    depths, deepest = set(), -1
    for error in errors:
        if error.depth is None or error.moved is None:
            return None
        depths |= set(error.depth[error.size > limit].tolist())
        deepest = max([deepest, *error.depth[error.moved].tolist()])
    return len(depths) if depths == set(range(len(depths))) and len(depths) <= deepest else None


def _resolve(what: str, axes: Axes, x: Tensor, *, ids: bool = False) -> tuple[int, ...]:
    """The axes as sorted non-negative numbers."""
    if axes == "tokens":
        indices: Sequence[int] = (-1,) if ids else (-2,)
    elif axes == "grid":
        indices = range(2, x.dim())
    elif isinstance(axes, str):
        raise InputError(f"axes must be 'tokens', 'grid' or a tuple of integers, but is {axes!r}")
    else:
        indices = axes
    if not indices or any(not -x.dim() <= a < x.dim() for a in indices):
        raise ShapeError(f"{what} has shape {tuple(x.shape)}, which has no axes {axes!r}")
    return tuple(sorted({a % x.dim() for a in indices}))
