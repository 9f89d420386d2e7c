"""R = (I - Q Q^+) G_q^(-1/2) M G_k^(-1/2) (I - K K^+): what lowers the loss but is out of reach of the present width.

    M = -dL/dZ, Z = W_q W_k^T                        the change of Z that lowers the loss fastest
    Q = G_q^(1/2) W_q,  K = G_k^(1/2) W_k            the present directions, in the metric

||R||^2 is the expressivity bottleneck (Verbockhaven et al. 2024): the decrease of the loss per unit step that no change
of the present directions can bring.  Heads and dimensions are chosen by it, cross-validated on two halves of the data:

WHICH     heads by <R_a, R_b>; those within `SHARE` of the first
HOW MANY  leading directions that keep at least `AGREEMENT` of their strength on the half they were not found on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.growth.growth_event import HeadScore
from headwise.growth.metric import Root, basis, roots
from headwise.growth.problem import Problem

HeadKey = tuple[str, int]
"""A head: the name of its layer, and its number."""

SHARE = 0.25
AGREEMENT = 0.3
"""Between the values measured where the width is a bottleneck (0.45 to 0.94) and where it is not (below 0.2)."""


@final
@dataclass(frozen=True, eq=False)
class Bottleneck:
    """R in whitened coordinates, (g d_q, d_k): stacked over the heads that share keys."""

    residual: Tensor
    left: Tensor  # G_q^(-1/2)
    right: Tensor  # G_k^(-1/2)

    @property
    def score(self) -> float:
        """||R||^2"""
        return float(self.residual.square().sum())

    def remaining(self) -> Tensor:
        """What is left of ||R||^2 after p = 0, 1, 2, … new dimensions."""
        energy = torch.linalg.svdvals(self.residual).square()
        return torch.cat([energy, energy.new_zeros(1)]).flip(0).cumsum(0).flip(0)


def bottleneck(problem: Problem, descent: Tensor, q: Root, k: Root) -> Bottleneck:
    """R for one M (g, d_q, d_k); Q and K are the present directions of all heads of the group together."""
    (residual,), _ = _residuals(problem, [descent], q, k)
    return Bottleneck(residual, q.inverse, k.inverse)


def _residuals(problem: Problem, descents: Sequence[Tensor], q: Root, k: Root) -> tuple[list[Tensor], list[Tensor]]:
    """R and the whitened M (g d_q, d_k) for several M, with the present directions orthonormalised once."""
    g, dq, dk = descents[0].shape
    white = [(q.inverse @ m.double() @ k.inverse).reshape(g * dq, dk) for m in descents]
    u = basis((q.root @ problem.present.wq.double()).reshape(g * dq, -1))
    v = basis(k.root @ problem.present.wk.double())
    outside = [w - u @ (u.mT @ w) for w in white]
    return [w - (w @ v) @ v.mT for w in outside], white


def score(problem: Problem, metric: str = "gram") -> tuple[float, float, float]:
    """(bottleneck, validated, share) of a head; see `HeadScore`."""
    (first, second), white = _residuals(problem, problem.halves(), *roots(problem, metric))
    whole, validated = float((white[0] * white[1]).sum()), float((first * second).sum())
    share = problem.half_share()
    raw = float((share * first + (1 - share) * second).square().sum())  # R is linear in M
    return raw, validated, validated / whole if whole > 0 else 0.0


def alignment(problem: Problem, count: int, metric: str = "gram") -> Tensor:
    """u_i^T R_b v_i / sigma_i, (count,): each direction found on one half of the data, judged on the other half.

    1 is a direction that both halves agree on, 0 is noise.  Averaged over the two ways round.
    """
    halves, _ = _residuals(problem, problem.halves(), *roots(problem, metric))
    ratios = []
    for fitted, judged in (halves, halves[::-1]):
        u, s, vh = torch.linalg.svd(fitted, full_matrices=False)
        strength = torch.einsum("qi,qk,ik->i", u[:, :count], judged, vh[:count])
        ratios.append(strength / s[:count].clamp(min=torch.finfo(s.dtype).tiny))
    return torch.stack(ratios).mean(0)


def rank(problems: Mapping[HeadKey, Problem], metric: str = "gram") -> list[HeadScore]:
    """The scores of all heads, the highest validated bottleneck first."""
    scores = [HeadScore(*key, problem.present.width, *score(problem, metric)) for key, problem in problems.items()]
    return sorted(scores, key=lambda s: -s.validated)


def directions(problem: Problem, metric: str = "gram") -> int:
    """How many new dimensions both halves of the data agree on; at most as many as the head has room for."""
    most = problem.width_limit() - problem.present.width
    if most < 1:
        return 0
    agreed = alignment(problem, most, metric) >= AGREEMENT
    return int(agreed.long().cumprod(0).sum())


def choose(
    problems: Mapping[HeadKey, Problem],
    p: int | Literal["auto"],
    heads: Sequence[HeadKey] | Literal["auto"],
    metric: str = "gram",
) -> dict[HeadKey, int]:
    """New dimensions per head; empty when none is recommended.  Heads given by name are checked, not judged."""
    if heads != "auto":
        return {key: _requested(problems, key, p, metric) for key in heads}
    ordered = [s for s in rank(problems, metric) if s.validated > 0]
    widths: dict[HeadKey, int] = {}
    for s in ordered:
        if s.validated < SHARE * ordered[0].validated:
            break
        problem = problems[s.layer, s.head]
        count = directions(problem, metric)
        if count and p != "auto":
            count = min(p, problem.width_limit() - problem.present.width)
        if count:
            widths[s.layer, s.head] = count
    return widths


def _requested(problems: Mapping[HeadKey, Problem], key: HeadKey, p: int | Literal["auto"], metric: str) -> int:
    if key not in problems:
        known = ", ".join(f"({layer!r}, {head})" for layer, head in problems)
        raise InputError(f"grow: there is no head {key!r} with statistics; there are {known}")
    problem = problems[key]
    if not bool(problem.folds.any()):
        raise InputError(
            f"grow: the loss does not depend on the scores of head {key[1]} of {key[0]} (its gradient is zero on every "
            "observed batch), so no direction can be found for it; choose other heads"
        )
    count = max(1, directions(problem, metric)) if p == "auto" else p
    problem.check_room(count)
    return count
