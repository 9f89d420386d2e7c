"""Symmetry groups as values: elements to test, how each acts on a grid, and the distance of positions from an edge.

    permutations   any order of the tokens, or of all positions of a grid at once
    translations   (g x)_p = x_(p - s), cyclic: torch.roll
    flips          along every set of axes
    quarter_turns  by 90, 180 and 270 degrees in every plane of two axes

An element acts on chosen axes of a tensor and leaves the others (batch, channels) alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headwise.errors import InputError, ShapeError


@final
@dataclass(frozen=True, eq=False)
class Element:
    """One symmetry g.  `act(x, axes)` is g x; `act_out` is the same g on the output, where that differs.

    `depth(sizes)` is, for every position p of the output grid, the distance of p and of its origin g^-1 p from the
    nearest edge, along the axes that g moves; None where the group has no edges.
    """

    name: str
    act: Callable[[Tensor, Sequence[int]], Tensor]
    act_out: Callable[[Tensor, Sequence[int]], Tensor]
    depth: Callable[[Sequence[int]], Tensor] | None


@final
@dataclass(frozen=True, eq=False)
class SymmetryGroup:
    """A name, and the elements to test on a grid of given sizes."""

    name: str
    elements: Callable[[Sequence[int]], list[Element]]


def permutations(samples: int = 8, seed: int = 0) -> SymmetryGroup:
    """`samples` random permutations of all positions; on a grid, of the positions of all axes together."""
    if samples < 1:
        raise InputError(f"permutations: samples must be at least 1, but is {samples}")

    def elements(sizes: Sequence[int]) -> list[Element]:
        generator, n = torch.Generator().manual_seed(seed), math.prod(sizes)
        orders = [_derangement(n, generator) for _ in range(samples)]
        return [_permutation(f"permutation {i} (seed {seed})", order) for i, order in enumerate(orders)]

    return SymmetryGroup(f"permutations({samples})", elements)


def translations(max_shift: int = 2, *, stride: int = 1) -> SymmetryGroup:
    """Shifts by -max_shift ... max_shift along each axis and along the diagonal.

    For a layer with stride, the input is shifted by stride * s where the output is shifted by s.
    """
    if max_shift < 1 or stride < 1:
        raise InputError(f"translations: max_shift and stride must be at least 1, but are {max_shift} and {stride}")

    def elements(sizes: Sequence[int]) -> list[Element]:
        if max_shift * stride >= min(sizes):
            raise ShapeError(
                f"translations: a shift by {max_shift} * stride {stride} needs longer sides than {tuple(sizes)}"
            )
        along = [tuple(int(a == axis) for a in range(len(sizes))) for axis in range(len(sizes))]
        directions = along + ([(1,) * len(sizes)] if len(sizes) > 1 else [])
        steps = [step for s in range(1, max_shift + 1) for step in (s, -s)]
        return [_translation(tuple(s * a for a in direction), stride) for direction in directions for s in steps]

    return SymmetryGroup(f"translations({max_shift})", elements)


def flips() -> SymmetryGroup:
    """Every non-empty set of axes reversed; on tokens, the reversed sequence."""

    def elements(sizes: Sequence[int]) -> list[Element]:
        axes = range(len(sizes))
        return [_flip(which) for r in range(1, len(sizes) + 1) for which in itertools.combinations(axes, r)]

    return SymmetryGroup("flips", elements)


def quarter_turns() -> SymmetryGroup:
    """Rotations by 90, 180 and 270 degrees in every plane; sides of a grid that is not square are swapped."""

    def elements(sizes: Sequence[int]) -> list[Element]:
        if len(sizes) < 2:
            raise ShapeError(f"quarter_turns: a rotation needs two axes, but x has one, of size {sizes[0]}")
        return [_turn(p, turns) for p in itertools.combinations(range(len(sizes)), 2) for turns in (1, 2, 3)]

    return SymmetryGroup("quarter turns", elements)


def edge_distance(sizes: Sequence[int], moved: Sequence[int], shift: Sequence[int] | None = None) -> Tensor:
    """min over the moved axes of min(q, size - 1 - q), q the position before an optional cyclic shift."""
    distance = torch.full(tuple(sizes), max(sizes))
    for axis in moved:
        q = (torch.arange(sizes[axis]) - (0 if shift is None else shift[axis])) % sizes[axis]
        along = torch.minimum(q, sizes[axis] - 1 - q)
        distance = torch.minimum(distance, along.reshape(-1, *(1,) * (len(sizes) - 1 - axis)))
    return distance


def _derangement(n: int, generator: torch.Generator) -> Tensor:
    """A random permutation other than the identity, which would test nothing."""
    order = torch.randperm(n, generator=generator)
    return order.roll(1) if torch.equal(order, torch.arange(n)) else order


def _permutation(name: str, order: Tensor) -> Element:
    def act(x: Tensor, axes: Sequence[int]) -> Tensor:
        last = range(-len(axes), 0)
        moved = x.movedim(tuple(axes), tuple(last))
        sizes = moved.shape[-len(axes) :]
        if sizes.numel() != len(order):
            raise ShapeError(f"permutations: the input has {len(order)} positions, but the output has {tuple(sizes)}")
        moved = moved.flatten(-len(axes)).index_select(-1, order.to(x.device)).unflatten(-1, sizes)
        return moved.movedim(tuple(last), tuple(axes))

    return Element(name, act, act, depth=None)


def _translation(shift: tuple[int, ...], stride: int) -> Element:
    def act(x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.roll(tuple(s * stride for s in shift), tuple(axes))

    def act_out(y: Tensor, axes: Sequence[int]) -> Tensor:
        return y.roll(shift, tuple(axes))

    def depth(sizes: Sequence[int]) -> Tensor:
        # the edge of the grid, and the seam: the former edge, which the roll moves inside
        moved = [axis for axis, s in enumerate(shift) if s]
        return torch.minimum(edge_distance(sizes, moved), edge_distance(sizes, moved, shift))

    return Element(f"translation {shift}", act, act_out, depth)


def _flip(which: tuple[int, ...]) -> Element:
    def act(x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.flip([axes[i] for i in which])

    return Element(f"flip of axes {which}", act, act, lambda sizes: edge_distance(sizes, which))


def _turn(plane: tuple[int, int], turns: int) -> Element:
    def act(x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.rot90(turns, [axes[i] for i in plane])

    return Element(f"{90 * turns} degrees in axes {plane}", act, act, lambda sizes: edge_distance(sizes, plane))
