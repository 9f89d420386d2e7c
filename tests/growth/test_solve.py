"""The closed form, the refit and plain SVD truncation (Burgund) against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.grow_baselines import recipe_for_one
from benchmarks.grow_kinds import compare, kinds
from torch import Tensor

from headwise.errors import NonFiniteError, ShapeError
from headwise.growth import Factors, Problem, closed_form, narrowed, refit
from headwise.growth.bottleneck import alignment, bottleneck, choose, directions, score
from headwise.growth.metric import METRICS, root, roots
from headwise.growth.normal_equations import NormalMap, TokenSequence
from headwise.growth.solve import (
    LONGEST,
    alternate,
    balanced,
    lengths,
    named_solution,
    predicted_change,
    score_change,
    truncate,
    typical_length,
    unconstrained,
)
from headwise.operators.masks import Mask

F64 = torch.float64


def attention_loss(x: Tensor, y: Tensor, z: Tensor, values: Tensor, target: Tensor, allowed: Tensor | None) -> Tensor:
    """A loss that depends on Z only through softmax(X Z Y^T)."""
    s = x @ z @ y.mT
    if allowed is not None:
        s = s.masked_fill(~allowed, -math.inf)
    return (torch.softmax(s, -1) @ values - target).square().mean()


def problem(
    seed: int = 0, *, g: int = 1, sequences: int = 8, d: int = 7, k: int = 2, n: int = 12
) -> tuple[Problem, dict]:
    """g heads that share keys, many sequences, query bias by a column of ones, causal scores; folds = sequences."""
    torch.manual_seed(seed)
    n = 12
    spread = torch.logspace(0, 1.5, d, dtype=F64)
    data = []
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    truth = torch.randn(g, d + 1, d, dtype=F64) / spread / 4
    for _ in range(sequences):
        y = torch.randn(n, d, dtype=F64) * spread / 5
        x = torch.cat([y, torch.ones(n, 1, dtype=F64)], 1)
        values = torch.randn(n, 4, dtype=F64)
        target = [torch.softmax((x @ t @ y.mT).masked_fill(~allowed, -math.inf), -1) @ values for t in truth]
        data.append((x, y, values, target))
    present = Factors(torch.randn(g, d + 1, k, dtype=F64) / 5, torch.randn(d, k, dtype=F64) / 5)

    def loss(z: Tensor) -> Tensor:
        losses = [attention_loss(x, y, z[h], v, t[h], allowed) for x, y, v, t in data for h in range(g)]
        return torch.stack(losses).sum() / len(data)

    folds = []
    for x, y, v, t in data:
        z = present.product().requires_grad_()
        value = torch.stack([attention_loss(x, y, z[h], v, t[h], allowed) for h in range(g)]).sum()
        folds.append(-torch.autograd.grad(value, z)[0])
    tokens = [TokenSequence(x, y, Mask(n, n, causal=True)) for x, y, _, _ in data]
    grams = [t.grams(centred=True) for t in tokens]
    gram_q = torch.stack([a for a, _ in grams]).sum(0) / (n * sequences)
    gram_k = torch.stack([c for _, c in grams]).mean(0)
    shares = torch.ones(sequences)
    case = Problem(torch.stack(folds), shares, present, gram_q, gram_k, tokens)
    return case, {"loss": loss, "data": data, "tokens": tokens, "allowed": allowed}


@pytest.mark.parametrize("solution", ["gram", "fisher", "refit"])
def test_the_predicted_change_is_the_derivative_of_the_loss(solution: str) -> None:
    case, truth = problem()
    path = named_solution(solution)[1](case, 2)
    base = float(truth["loss"](case.present.product()))
    if solution == "refit":
        # truncation to k + 2 moves Z at once, so compare the prediction for the step itself
        eta = 1e-4 / path.unit
    else:
        assert torch.equal(path.at(0.0).product(), case.present.product())
        eta = 1e-6 / path.unit
    grown = path.at(eta)
    change = float(truth["loss"](grown.product())) - base
    assert change == pytest.approx(predicted_change(case, grown), rel=2e-3)
    if solution != "refit":
        sigma = torch.linalg.svdvals(bottleneck(case, case.descent, *roots(case, solution)).residual)
        assert predicted_change(case, grown) == pytest.approx(-eta * float(sigma[:2].square().sum()), rel=1e-6)
    assert change < 0


def test_minus_lowers_the_loss_and_plus_raises_it() -> None:
    """The target B = S - eta dL/dS lowers the loss; Burgund prints B = S + eta dL/dS, which raises it."""
    torch.manual_seed(3)
    n, d, k = 10, 4, 2
    x, values, target = (torch.randn(*shape, dtype=F64) for shape in ((n, d), (n, 3), (n, 3)))
    z0 = torch.randn(d, k, dtype=F64) @ torch.randn(k, d, dtype=F64) / 4
    s = (x @ z0 @ x.mT).requires_grad_()
    loss = (torch.softmax(s, -1) @ values - target).square().mean()
    (g,) = torch.autograd.grad(loss, s)
    base = loss.item()

    def fitted(sign: float) -> float:
        z = recipe_for_one(x, s.detach() + sign * g, d).product()[0]
        return float(attention_loss(x, x, z, values, target, None))

    assert fitted(+1.0) > base > fitted(-1.0)


def test_new_dimensions_lie_outside_the_present_ones_and_match_the_best_of_many_starts() -> None:
    """max <M, dZ> over rank-p dZ with whitened length 1 and no component the present directions could give."""
    case, _ = problem(1)
    q, k = roots(case)
    r = bottleneck(case, case.descent, q, k).residual
    present = q.root @ case.present.wq[0]
    assert float((present.mT @ r).abs().max()) < 1e-10 * float(r.abs().max())
    best = float(torch.linalg.svdvals(r)[:2].square().sum().sqrt())
    by_search = 0.0
    for start in range(8):
        torch.manual_seed(start)
        a, b = (torch.randn(n, 2, dtype=F64).requires_grad_() for n in r.shape)
        optimizer = torch.optim.LBFGS([a, b], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-14)

        def closure(a: Tensor = a, b: Tensor = b, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            z = a @ b.mT
            value = -(r * z).sum() / z.norm()
            value.backward()
            return value

        optimizer.step(closure)
        by_search = max(by_search, -closure().item())
    assert best == pytest.approx(by_search, rel=1e-6)


def one_sequence(seed: int, n: int = 14, d: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(n, d, dtype=F64) * torch.logspace(0, 2, d, dtype=F64)
    return x, x @ torch.randn(d, d, dtype=F64) @ x.mT / 100 + torch.randn(n, n, dtype=F64)


def residual(x: Tensor, b: Tensor, z: Tensor) -> float:
    return float((b - x @ z @ x.mT).norm() / b.norm())


def best_by_lbfgs(x: Tensor, b: Tensor, rank: int, starts: int = 4) -> float:
    """min ||B - X A C^T X^T|| over A, C by quasi-Newton from random starts, in well-conditioned coordinates."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    back = vh.mT / s
    best = math.inf
    for start in range(starts):
        torch.manual_seed(start)
        a, c = (torch.randn(x.shape[1], rank, dtype=F64).requires_grad_() for _ in range(2))
        optimizer = torch.optim.LBFGS(
            [a, c], max_iter=2000, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=1e-16
        )

        def closure(a: Tensor = a, c: Tensor = c, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = (b - u @ a @ c.mT @ u.mT).square().sum()
            value.backward()
            return value

        optimizer.step(closure)
        best = min(best, residual(x, b, (back @ a @ c.mT @ back.mT).detach()))
    return best


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rank", [1, 3])
def test_one_sequence_reaches_the_best_of_many_starts(seed: int, rank: int) -> None:
    x, b = one_sequence(seed)
    normal = NormalMap([TokenSequence(x, x, Mask(len(x), len(x)))], centred=False)
    z, iterations = unconstrained(normal, x.mT @ b @ x)
    assert iterations <= 2
    grown = truncate(z.unsqueeze(0), rank, *(root(g) for g in normal.means()))
    ours = residual(x, b, grown.product()[0])
    assert ours == pytest.approx(best_by_lbfgs(x, b, rank), rel=1e-6)
    polished = alternate(normal, x.mT @ b @ x, grown)
    assert residual(x, b, polished.product()[0]) == pytest.approx(ours, rel=1e-8)


def test_rank_deficient_tokens_use_the_pseudo_inverse() -> None:
    x, b = one_sequence(5)
    x = torch.cat([x, x[:, :2] @ torch.randn(2, 3, dtype=F64)], 1)  # nine columns of rank six
    normal = NormalMap([TokenSequence(x, x, Mask(len(x), len(x)))], centred=False)
    z, _ = unconstrained(normal, x.mT @ b @ x)
    plus = torch.linalg.pinv(x)
    torch.testing.assert_close(x @ z @ x.mT, x @ plus @ b @ plus.mT @ x.mT)
    # more columns than rows: everything can be fitted
    wide = torch.randn(4, 9, dtype=F64)
    b = torch.randn(4, 4, dtype=F64)
    z, _ = unconstrained(NormalMap([TokenSequence(wide, wide, Mask(4, 4))], centred=False), wide.mT @ b @ wide)
    torch.testing.assert_close(wide @ z @ wide.mT, b)


@pytest.mark.parametrize("kind", kinds())
def test_the_refit_beats_plain_truncation_on_every_kind_of_data(kind: str) -> None:
    residuals = compare(*kinds()[kind], rank=3)
    assert residuals["refit"] < residuals["plain"] * (1 - 1e-6)
    assert residuals["free"] <= residuals["refit"] + 1e-9


def test_the_normal_map_is_what_plain_torch_says() -> None:
    """N and the Gram matrices against dense weights, for causal, padded and dense masks, centred and not."""
    torch.manual_seed(0)
    x, y, z = (torch.randn(*shape, dtype=F64) for shape in ((6, 4), (7, 5), (4, 5)))
    masks = {
        "none": Mask(6, 7),
        "causal": Mask(6, 7, causal=True),
        "padded": Mask(6, 7, key_mask=torch.arange(7) < 5),
        "dense": Mask(6, 7, pair_mask=torch.rand(6, 7) > 0.4),
    }
    for mask in masks.values():
        weights = mask.rows(0, 6).double()
        tokens = TokenSequence(x, y, mask)
        for centred in (False, True):
            s = weights * (x @ z @ y.mT)
            if centred:
                s = weights * (s - s.sum(1, keepdim=True) / weights.sum(1, keepdim=True))
            expected = x.mT @ s @ y
            torch.testing.assert_close(tokens.normal(z, centred=centred), expected)
            torch.testing.assert_close(NormalMap([tokens], centred=centred)(z), expected)
            c = torch.zeros(5, 5, dtype=F64)
            for row in weights:
                keys = y[row > 0]
                keys = keys - keys.mean(0) if centred else keys
                c += keys.mT @ keys / len(weights)
            torch.testing.assert_close(tokens.grams(centred=centred)[1], c)


def test_the_fisher_metric_is_the_softmax_jacobian() -> None:
    case, truth = problem(2)
    z = case.present.product()[0]
    total = torch.zeros_like(case.gram_k)
    for x, y, _, _ in truth["data"]:
        p = torch.softmax((x @ z @ y.mT).masked_fill(~truth["allowed"], -math.inf), -1)
        for row in p:
            total += y.mT @ (torch.diag(row) - torch.outer(row, row)) @ y / len(p) / len(truth["data"])
    torch.testing.assert_close(METRICS["fisher"](case)[1], total)


def test_grouped_queries_share_new_keys_and_still_lower_the_loss() -> None:
    case, truth = problem(4, g=3)
    path = closed_form(case, 2)
    base = float(truth["loss"](case.present.product()))
    eta = 1e-6 / path.unit
    grown = path.at(eta)
    assert grown.wq.shape == (3, 8, 4)
    assert grown.wk.shape == (7, 4)
    assert float(truth["loss"](grown.product())) - base == pytest.approx(predicted_change(case, grown), rel=2e-3)
    # the group's tangent space cannot give R: no change of shared keys or of any head's queries has a part along it
    q, k = roots(case)
    r = bottleneck(case, case.descent, q, k).residual.reshape(3, 8, 7)
    tangent = (q.root @ torch.randn(3, 8, 2, dtype=F64)) @ (k.root @ case.present.wk).mT
    tangent = tangent + (q.root @ case.present.wq) @ (k.root @ torch.randn(7, 2, dtype=F64)).mT
    assert abs(float((r * tangent).sum())) < 1e-9 * float(r.norm() * tangent.norm())


def test_the_bottleneck_falls_with_p_and_is_validated_on_two_halves() -> None:
    case, _ = problem(0)
    limits = bottleneck(case, case.descent, *roots(case))
    remaining = limits.remaining()
    assert remaining[0].item() == pytest.approx(limits.score)
    assert bool((remaining.diff() <= 0).all())
    assert remaining[-1] == 0
    # folds that agree up to noise, and folds that are noise only: 30 draws of each
    torch.manual_seed(0)
    q, k = roots(case)
    draws: dict[str, list[tuple[float, float, float]]] = {"true": [], "false": []}
    plans = {"true": 0, "false": 0}
    for _ in range(30):
        noise = math.sqrt(limits.score / 56) * (q.root @ torch.randn_like(case.folds) @ k.root)
        for name, folds in (("true", case.descent + 0.3 * noise), ("false", noise)):
            judged = Problem(folds, case.shares, case.present, case.gram_q, case.gram_k)
            raw, validated, _ = score(judged)
            draws[name].append((raw, validated, float(alignment(judged, 1))))
            plans[name] += len(choose({("layer", 0): judged}, "auto", "auto"))
    true, false = (torch.tensor(draws[name]).mean(0) for name in ("true", "false"))
    assert true[0] > limits.score  # noise inflates the raw score, not the validated one
    assert true[1].item() == pytest.approx(limits.score, rel=0.05)
    assert abs(false[1]) < 0.15 * false[0]
    assert true[2] > 0.9
    assert abs(false[2]) < 0.2
    # growth is proposed where there is a signal, and seldom where there is none
    assert plans["true"] == 30
    assert plans["false"] <= 10


def test_shrinking_drops_the_direction_that_changes_the_scores_least() -> None:
    torch.manual_seed(0)
    case, truth = problem(0, k=4)
    fewer = narrowed(case, 1)
    assert fewer.width == 3
    # no other rank-3 product is nearer in the metric
    q, k = (root(g) for g in (case.gram_q, case.gram_k))
    s = torch.linalg.svdvals(q.root @ case.present.product()[0] @ k.root)
    assert score_change(case, fewer) == pytest.approx(float(s[3]), rel=1e-4)
    # a direction without effect can be removed without changing the loss
    idle = Factors(
        torch.cat([case.present.wq, torch.randn(1, 8, 1, dtype=F64)], -1),
        torch.cat([case.present.wk, torch.zeros(7, 1, dtype=F64)], -1),
    )
    wide = Problem(case.folds, case.shares, idle, case.gram_q, case.gram_k)
    same = narrowed(wide, 1)
    change = float(truth["loss"](same.product())) - float(truth["loss"](case.present.product()))
    assert abs(change) < 1e-8
    assert predicted_change(wide, same) == pytest.approx(change, abs=1e-8)


def test_errors_name_the_sizes() -> None:
    case, _ = problem()
    with pytest.raises(ShapeError, match=r"2 wide and at 7 it can express every.*room for 5 more.*p = 6"):
        closed_form(case, 6)
    with pytest.raises(ShapeError, match="p must be at least 1, but is 0"):
        closed_form(case, 0)
    with pytest.raises(ShapeError, match="can lose between 1 and 1 dimensions, not p = 2"):
        narrowed(case, 2)
    with pytest.raises(NonFiniteError, match="gradient of the scores has non-finite entries"):
        Problem(case.folds * math.nan, case.shares, case.present, case.gram_q, case.gram_k)
    with pytest.raises(ShapeError, match="axis 'd_k' must agree"):
        Problem(case.folds[..., :-1], case.shares, case.present, case.gram_q, case.gram_k)
    single = Problem(case.folds[:1], case.shares[:1], case.present, case.gram_q, case.gram_k)
    with pytest.raises(ShapeError, match="one sequence cannot be cross-validated"):
        score(single)
    with pytest.raises(ShapeError, match="Fisher metric needs stored sequences"):
        closed_form(single, 1, metric="fisher")
    with pytest.raises(ShapeError, match="refit needs stored sequences"):
        refit(single, 1)


def test_new_directions_are_balanced_like_the_present_ones_and_not_longer_than_half_of_them() -> None:
    case, _ = problem(5)
    present, path = case.present.double(), closed_form(case, 2)
    old_q, old_k = lengths(present)
    ratio = float((old_q.square().mean() / old_k.square().mean()).sqrt())
    for eta in (1e-6, 1.0, 1e6):
        grown = path.at(eta / path.unit)
        q, k = (x[present.width :] for x in lengths(grown))
        assert torch.allclose(q / k, torch.full_like(q, ratio))
        assert float((q * k).amax()) <= LONGEST * typical_length(present) * (1 + 1e-9)
    assert float((q * k).amin()) == pytest.approx(LONGEST * typical_length(present))  # each is cut
    raw = Factors(torch.randn(1, 8, 3, dtype=F64), torch.randn(7, 3, dtype=F64))
    assert torch.allclose(balanced(raw, present).product(), raw.product())  # without a limit scores do not change


def test_auto_may_more_than_double_the_width() -> None:
    """Five directions agree on both halves of the data; a head of width 1 may take all there is room for."""
    torch.manual_seed(0)
    d, wanted = 12, 5
    m = torch.randn(d, wanted, dtype=F64) @ torch.randn(wanted, d, dtype=F64)
    present = Factors(torch.randn(1, d, 1, dtype=F64), torch.randn(d, 1, dtype=F64))
    folds = torch.stack([m + 1e-3 * torch.randn(d, d, dtype=F64) for _ in range(4)]).unsqueeze(1)
    case = Problem(folds, torch.ones(4), present, torch.eye(d, dtype=F64), torch.eye(d, dtype=F64))
    assert directions(case) in (wanted, wanted - 1)
