"""New query/key dimensions in closed form: R = (I - Q Q^+) G_q^(-1/2) M G_k^(-1/2) (I - K K^+) = U Sigma V^T.

For one head (or a group of heads that share keys), S = X_q W_q W_k^T X^T with the scale folded into W_q, and

    M = sum_b X_q^T (-dL/dS) X = -dL/dZ, Z = W_q W_k^T         (the change of Z that lowers the loss fastest)
    Q = G_q^(1/2) W_q,  K = G_k^(1/2) W_k                      (the present directions, in the data's metric)

R is what the loss asks for and no change of the present directions can give: the expressivity bottleneck is ||R||^2.
With step eta the p best new dimensions are

    W_q^new = sqrt(eta) G_q^(-1/2) U_p Sigma_p^(1/2),   W_k^new = sqrt(eta) G_k^(-1/2) V_p Sigma_p^(1/2),

they change S by eta ||Sigma_p|| and the loss by -eta sum sigma_i^2 to first order; eta = 0 preserves the function.
Old weights stay.  Sources: the report on growing attention (minus where it prints plus), Verbockhaven et al. 2024 for
the bottleneck; derived in docs/theory/grow.md.  Pure functions, float64 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from headwise.errors import NonFiniteError, ShapeError
from headwise.growth.fisher import fisher_gram
from headwise.growth.gram_roots import Root, basis, root
from headwise.growth.normal_equations import Atom, NormalMap, Tokens
from headwise.shapes import same_axis

DAMPING = 1e-3
"""Of the mean eigenvalue, added to a metric before it is inverted; larger values undo the whitening (1 loses 7x)."""


@final
@dataclass(frozen=True, eq=False)
class Factors:
    """W_q (g, d_q, k) for the g heads of a group and the W_k (d_k, k) they share; the score scale is inside W_q."""

    wq: Tensor
    wk: Tensor

    @property
    def width(self) -> int:
        return self.wk.shape[-1]

    def product(self) -> Tensor:
        """Z_h = W_q,h W_k^T: (g, d_q, d_k)"""
        return self.wq @ self.wk.mT

    def beside(self, other: Factors) -> Factors:
        """The dimensions of both."""
        return Factors(torch.cat([self.wq, other.wq], -1), torch.cat([self.wk, other.wk], -1))


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """All that growing a head needs to know.

    folds    (f, g, d_q, d_k): M measured on f disjoint parts of the data, each an estimate of the whole's
    shares   (f,): how much data, in batches, each fold saw
    present  the weights as they are
    gram_q   mean over query rows of x x^T, (d_q, d_q); with a query bias x ends in a 1
    gram_k   mean over query rows of sum_j (x_j - mean)(x_j - mean)^T, j what the row may see, (d_k, d_k)
    kept     whole sequences; atoms: clusters of the rest (statistics.py)
    biased   whether scores had an additive bias, which the sequences do not know
    roots    damped roots of gram_q and gram_k, when they have been computed already
    """

    folds: Tensor
    shares: Tensor
    present: Factors
    gram_q: Tensor
    gram_k: Tensor
    kept: Sequence[Tokens] = ()
    atoms: Sequence[Atom] = ()
    biased: bool = False
    roots: tuple[Root, Root] | None = None

    def __post_init__(self) -> None:
        g, dq, k = self.present.wq.shape
        same_axis("grow.Problem", "g", M=self.folds.shape[1], W_q=g)
        same_axis("grow.Problem", "d_q", M=self.folds.shape[2], W_q=dq, gram_q=self.gram_q.shape[0])
        same_axis("grow.Problem", "d_k", M=self.folds.shape[3], W_k=len(self.present.wk), gram_k=self.gram_k.shape[0])
        same_axis("grow.Problem", "k", W_q=k, W_k=self.present.width)
        if not bool(self.folds.isfinite().all()):
            raise NonFiniteError("grow: the gradient of the scores has non-finite entries; growth would spread them")

    @cached_property
    def normal(self) -> NormalMap:
        """The least-squares problem of the scores, or a ShapeError when no sequence is known."""
        if not self.kept and not self.atoms:
            raise ShapeError("grow: a refit needs kept sequences; raise the memory budget of the statistics")
        return NormalMap(self.kept, self.atoms)

    @cached_property
    def fisher_k(self) -> Tensor:
        """gram_k with attention weights instead of ones, or a ShapeError when it cannot be computed."""
        if not self.kept:
            raise ShapeError("grow: the Fisher metric needs kept sequences; raise the memory budget of the statistics")
        if self.biased:
            raise ShapeError("grow: the Fisher metric needs the attention, but its scores have a bias that is not kept")
        return fisher_gram(self.kept, self.present.product())

    @cached_property
    def moment(self) -> Tensor:
        """M over all the data: (g, d_q, d_k)"""
        weights = self.shares / self.shares.sum()
        return torch.einsum("f,fgqk->gqk", weights.double(), self.folds.double())

    def halves(self) -> tuple[Tensor, Tensor]:
        """M on two disjoint halves of the data, or a ShapeError when there is only one part."""
        live = self.shares.nonzero().flatten()
        if len(live) < 2:
            raise ShapeError("grow: one sequence cannot be cross-validated; observe at least two, or name p and heads")
        return self._mean(live[0::2]), self._mean(live[1::2])

    def half_share(self) -> float:
        """How much of the data the first half is."""
        live = self.shares.nonzero().flatten()
        return float(self.shares[live[0::2]].sum() / self.shares.sum())

    def _mean(self, index: Tensor) -> Tensor:
        weights = self.shares[index].double()
        return torch.einsum("f,fgqk->gqk", weights / weights.sum(), self.folds[index].double())

    def width_limit(self) -> int:
        """The width at which Z can be any matrix: no dimension beyond it changes what the head can express."""
        g, dq, _ = self.present.wq.shape
        return min(g * dq, len(self.present.wk))


@final
@dataclass(frozen=True, eq=False)
class Bottleneck:
    """R in whitened coordinates, (g d_q, d_k): stacked over the heads that share keys."""

    residual: Tensor
    left: Tensor  # G_q^(-1/2)
    right: Tensor  # G_k^(-1/2)

    @property
    def score(self) -> float:
        """||R||^2: the loss decrease per unit step that only new dimensions can bring."""
        return float(self.residual.square().sum())

    def falls(self) -> Tensor:
        """What is left of ||R||^2 after p = 0, 1, 2, … new dimensions."""
        energy = torch.linalg.svdvals(self.residual).square()
        return torch.cat([energy, energy.new_zeros(1)]).flip(0).cumsum(0).flip(0)


def metrics(problem: Problem, *, fisher: bool = False, damping: float = DAMPING) -> tuple[Root, Root]:
    """The damped roots of G_q and of G_k or, with `fisher`, of its attention-weighted form."""
    q, k = problem.roots if problem.roots is not None and damping == DAMPING else (None, None)
    q = root(problem.gram_q, damping) if q is None else q
    if fisher:
        return q, root(problem.fisher_k, damping)
    return q, root(problem.gram_k, damping) if k is None else k


def bottleneck(problem: Problem, moment: Tensor, q: Root, k: Root) -> Bottleneck:
    """R for one M (g, d_q, d_k); Q and K are the present directions of all heads of the group together."""
    g, dq, dk = moment.shape
    white = (q.inverse @ moment.double() @ k.inverse).reshape(g * dq, dk)
    present_q = (q.root @ problem.present.wq.double()).reshape(g * dq, -1)
    present_k = k.root @ problem.present.wk.double()
    u, v = basis(present_q), basis(present_k)
    white = white - u @ (u.mT @ white)
    return Bottleneck(white - (white @ v) @ v.mT, q.inverse, k.inverse)


@final
@dataclass(frozen=True, eq=False)
class Score:
    """How much a head wants to be wider.

    raw       ||R||^2, noise included
    validated <R_a, R_b> over two halves of the data: an estimate of the same without the noise, may be negative
    share     validated, relative to <M_a, M_b> in the same metric: the part of the wish the present width cannot meet
    """

    raw: float
    validated: float
    share: float


def score(problem: Problem, *, fisher: bool = False) -> Score:
    """The bottleneck of a head and its cross-validated form; no singular value decomposition of M."""
    q, k = metrics(problem, fisher=fisher)
    halves = problem.halves()
    g, dq, dk = halves[0].shape
    whites = [(q.inverse @ m @ k.inverse).reshape(g * dq, dk) for m in halves]
    # `bottleneck` on each half, with the present directions orthonormalised once
    u = basis((q.root @ problem.present.wq.double()).reshape(g * dq, -1))
    v = basis(k.root @ problem.present.wk.double())
    first, second = (r - (r @ v) @ v.mT for r in (w - u @ (u.mT @ w) for w in whites))
    wish, validated = float((whites[0] * whites[1]).sum()), float((first * second).sum())
    share = problem.half_share()
    raw = float((share * first + (1 - share) * second).square().sum())  # R is linear in M
    return Score(raw, validated, validated / wish if wish > 0 else 0.0)


def alignment(problem: Problem, count: int, *, fisher: bool = False) -> Tensor:
    """u_i^T R_b v_i / sigma_i, (count,): each direction found on one half of the data, judged on the other half.

    1 is a direction that both halves agree on, 0 is noise.  Both ways round, averaged.
    """
    q, k = metrics(problem, fisher=fisher)
    parts = [bottleneck(problem, m, q, k).residual for m in problem.halves()]
    ratios = []
    for found, judged in (parts, parts[::-1]):
        u, s, vh = torch.linalg.svd(found, full_matrices=False)
        kept = torch.einsum("qi,qk,ik->i", u[:, :count], judged, vh[:count])
        ratios.append(kept / s[:count].clamp(min=torch.finfo(s.dtype).tiny))
    return torch.stack(ratios).mean(0)


@final
@dataclass(frozen=True, eq=False)
class Path:
    """Weights as a function of the step eta; `polished` spends more on a step already chosen."""

    at: Callable[[float], Factors]
    polished: Callable[[float], Factors]
    unit: float  # how much S changes per unit of eta (root mean square over query rows)


Solution = Callable[[Problem, int], Path]
"""(problem, p) -> the path along which p dimensions are added."""


def closed_form(problem: Problem, p: int) -> Path:
    """The p best new dimensions, present ones fixed, in the Kronecker metric G_q x G_k."""
    return _closed_form(problem, p, fisher=False)


def fisher_form(problem: Problem, p: int) -> Path:
    """The same with G_k weighted by the head's own attention: the softmax's Jacobian, averaged over queries."""
    return _closed_form(problem, p, fisher=True)


def _closed_form(problem: Problem, p: int, *, fisher: bool) -> Path:
    room(problem, p)
    found = bottleneck(problem, problem.moment, *metrics(problem, fisher=fisher))
    u, s, vh = torch.linalg.svd(found.residual, full_matrices=False)
    g, dq, _ = problem.present.wq.shape
    half = s[:p].sqrt()
    wq = found.left @ (u[:, :p] * half).reshape(g, dq, p)
    wk = found.right @ (vh[:p].mT * half)
    present = Factors(problem.present.wq.double(), problem.present.wk.double())

    def at(eta: float) -> Factors:
        step = math.sqrt(eta)
        return present.beside(Factors(step * wq, step * wk))

    return Path(at, at, float(s[:p].square().sum().sqrt()))


def room(problem: Problem, p: int) -> None:
    """A ShapeError unless p more dimensions can make the head express more."""
    limit, width = problem.width_limit(), problem.present.width
    if p < 1:
        raise ShapeError(f"grow: p must be at least 1, but is {p}")
    if width + p > limit:
        raise ShapeError(
            f"grow: the head is {width} wide and at {limit} it can express every bilinear score, so it has room for "
            f"{max(0, limit - width)} more dimensions, not p = {p}"
        )


def predicted_change(problem: Problem, grown: Factors) -> float:
    """-<M, Z' - Z>: the change of the loss to first order; negative is better."""
    return -float((problem.moment * (grown.product() - problem.present.product().double())).sum())


def score_change(problem: Problem, grown: Factors) -> float:
    """||G_q^(1/2) (Z' - Z) G_k^(1/2)||_F: how far a row of scores moves, root mean square over query rows."""
    change = grown.product() - problem.present.product().double()
    value = torch.einsum("gqk,qr,grl,lk->", change, problem.gram_q.double(), change, problem.gram_k.double())
    return math.sqrt(max(0.0, float(value)))


def truncate(z: Tensor, rank: int, q: Root, k: Root) -> Factors:
    """The best Z (g, d_q, d_k) of rank <= r in the metric: SVD of G_q^(1/2) Z G_k^(1/2), mapped back, split evenly."""
    g, dq, dk = z.shape
    u, s, vh = torch.linalg.svd((q.root @ z @ k.root).reshape(g * dq, dk), full_matrices=False)
    half = s[:rank].sqrt()
    return Factors(q.inverse @ (u[:, :rank] * half).reshape(g, dq, -1), k.inverse @ (vh[:rank].mT * half))


def shrink(problem: Problem, p: int) -> Factors:
    """The weights with p directions fewer whose scores are nearest to the present ones in the data's metric."""
    width = problem.present.width
    if not 1 <= p < width:
        raise ShapeError(f"grow: a head of width {width} can lose between 1 and {width - 1} dimensions, not p = {p}")
    return truncate(problem.present.product().double(), width - p, *metrics(problem, damping=1e-9))
