"""NaN, infinities and numbers near the end of a dtype's range: a right result or a sentence, never a wrong number."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from headwise.errors import NonFiniteError
from headwise.operators import (
    AttentionOperator,
    dot_product,
    efficient,
    fixed,
    gaussian,
    hashed,
    near_far,
    nystrom,
    projected,
    softmax,
    strided,
    window,
)
from headwise.operators.linear.projections import dense
from headwise.testing.contract import normal

MEASURES: dict[str, Callable[[AttentionOperator, Tensor], Tensor]] = {
    "apply": lambda op, x: op(x),
    "adjoint": lambda op, x: op.adjoint(x),
    "dense": lambda op, x: op.dense(),
    "entropy": lambda op, x: op.entropy(),  # type: ignore[attr-defined]
    "frobenius": lambda op, x: op.frobenius(),  # type: ignore[attr-defined]
    "row_maxima": lambda op, x: op.row_maxima(),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_of_nan_or_infinity_is_refused_with_its_count(bad: float) -> None:
    bias = torch.zeros(5, 5)
    bias[1, 2:4] = bad
    bias[3, 0] = -math.inf
    with pytest.raises(NonFiniteError, match=r"Softmax: attn_bias has 2 NaN or \+inf of 25 entries"):
        softmax(normal(5, 4, seed=0).float(), normal(5, 4, seed=1).float(), attn_bias=bias)


def test_finite_biases_of_any_size_are_accepted() -> None:
    """Sums of these overflow, which is no reason to refuse them."""
    q, k = normal(5, 4, seed=0).float(), normal(5, 4, seed=1).float()
    least = torch.finfo(torch.float32).min
    bias = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), least)
    torch.testing.assert_close(softmax(q, k, attn_bias=bias).dense(), softmax(q, k, causal=True).dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_bias_of_minus_infinity_is_a_mask_with_finite_gradients(measure: str, dtype: torch.dtype) -> None:
    """Row 3 attends to nothing, column 1 is attended to by nothing; results and gradients are those of a pair_mask."""
    visible = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    visible[3], visible[:, 1] = False, False
    finite = normal(5, 6, seed=4, dtype=dtype)

    def run(**masks: Tensor) -> list[Tensor]:
        x = normal(6 if measure == "apply" else 5, 4, seed=2, dtype=dtype).requires_grad_()
        leaves = [normal(2, rows, 4, seed=seed, dtype=dtype).requires_grad_() for seed, rows in ((0, 5), (1, 6))]
        bias = masks["attn_bias"].clone().requires_grad_()
        result = MEASURES[measure](softmax(*leaves, **{**masks, "attn_bias": bias}), x)
        pull = torch.linspace(-1, 2, result.numel(), dtype=dtype).reshape(result.shape)
        options = {"allow_unused": True, "materialize_grads": True}
        return [result, *torch.autograd.grad(result, [*leaves, bias, x], pull, **options)]

    folded = run(attn_bias=finite.masked_fill(~visible, -math.inf))
    separate = run(attn_bias=finite, pair_mask=visible)
    assert all(x.isfinite().all() for x in folded)
    torch.testing.assert_close(folded, separate)
    if measure in ("apply", "dense"):
        assert folded[0][..., 3, :].abs().max() == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # fused attention has no batching rule on CPU
def test_minus_infinity_is_a_mask_under_vmap_and_compile_too() -> None:
    q, k, v = (normal(2, 5, 4, seed=seed) for seed in range(3))
    bias = torch.zeros(2, 5, 5, dtype=torch.float64)
    bias[:, 2], bias[:, :, 1] = -math.inf, -math.inf
    v[:, 1] = math.nan

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return softmax(q, k, attn_bias=bias)(v)

    expected = run(q, k, v, bias)
    assert expected.isfinite().all()
    torch.testing.assert_close(torch.func.vmap(run)(q, k, v, bias), expected)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(q, k, v, bias), expected)


E_MATRIX = normal(4, 16, seed=9)
SCORED: dict[str, Callable[[Tensor, Tensor], AttentionOperator]] = {
    "softmax": softmax,
    "gaussian": gaussian,
    "dot_product": dot_product,
    "window": partial(window, width=3),
    "strided": strided,
    "fixed": fixed,
    "hashed": partial(hashed, chunk=4),
    "efficient": efficient,
    "nystrom": partial(nystrom, landmarks=4),
    "projected": lambda q, k: projected(q, k, dense(E_MATRIX.to(q))),
    "near_far": lambda q, k: near_far(q, k, *(x.to(q) for x in FEATURES), block=2),
}
FEATURES = normal(3, 4, seed=5), normal(3, 4, seed=6), normal(3, seed=7)


@pytest.mark.parametrize("name", SCORED)
def test_scores_beyond_the_range_of_the_dtype_are_refused(name: str) -> None:
    q, k = 1e20 * normal(16, 4, seed=0).float(), 1e20 * normal(16, 4, seed=1).float()
    with pytest.raises(NonFiniteError, match=r"products of q and k may reach \S+ .*; divide q or k by a constant"):
        SCORED[name](q, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in SCORED if name not in ("dot_product", "nystrom")])
def test_large_scores_are_right_or_refused(name: str, dtype: torch.dtype) -> None:
    """From 1 to 1e36: the row sums of a softmax stay one, and the adjoint is the transpose."""
    refused = False
    for exponent in range(0, 19, 2):
        q, k, u = (normal(16, 4, seed=seed, dtype=dtype) for seed in range(3))
        try:
            op = SCORED[name](q * 10.0**exponent, k * 10.0**exponent)
        except NonFiniteError:
            refused = True
            continue
        assert not refused, f"1e{exponent} is accepted, but a smaller size is refused"
        p = op.dense().double()
        if name != "projected":  # its E does not average
            torch.testing.assert_close(p.sum(-1), torch.ones(16).double(), rtol=0, atol=2e-2)
        torch.testing.assert_close(op.adjoint(u).double(), p.mT @ u.double(), rtol=0, atol=6e-2)
        torch.testing.assert_close(op(u).double(), p @ u.double(), rtol=0, atol=6e-2)


def test_entropy_and_norm_of_large_scores() -> None:
    """Ties among scores of 1e12, where log-sum-exps have no digits left after the point."""
    q = torch.full((3, 1), 1e6)
    k = torch.tensor([[1e6], [1e6], [-1e6], [0.0]])
    op = softmax(q, k, scale=1.0)
    torch.testing.assert_close(op.dense(), torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(3, 4))
    torch.testing.assert_close(op.entropy(), torch.full((3,), math.log(2)))
    torch.testing.assert_close(op.row_maxima(), torch.full((3,), 0.5))
    torch.testing.assert_close(op.frobenius(), torch.tensor(math.sqrt(1.5)))
    torch.testing.assert_close(op.adjoint(torch.ones(3, 1)).flatten(), torch.tensor([1.5, 1.5, 0.0, 0.0]))


def test_half_precision_scores_do_not_overflow() -> None:
    """Scores of 5e5 exceed float16, which ends at 65504."""
    q, k = (400 * normal(6, 8, seed=seed).half() for seed in (0, 1))
    for build in (softmax, gaussian):
        half, double = build(q, k), build(q.double(), k.double())
        torch.testing.assert_close(half.dense().double(), double.dense(), rtol=0, atol=1e-2)
        torch.testing.assert_close(half.entropy().double(), double.entropy(), rtol=0, atol=1e-2)
        torch.testing.assert_close(half.row_maxima().double(), double.row_maxima(), rtol=0, atol=1e-2)
    assert dot_product(q, k)(normal(6, 2, seed=2).half() / 1e4).isfinite().all()
