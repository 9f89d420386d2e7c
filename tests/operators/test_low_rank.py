"""P_r = sum sigma_i u_i v_i^T: as good as it can be, with an error estimate that holds, and usable as any operator."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import HeadwiseError, InputError, ShapeError
from headwise.operators import low_rank, per_head, scale, shift, softmax, uniform, window
from headwise.testing import references
from tests.operators.properties import draw


def spectral(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(x, 2)


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
@pytest.mark.parametrize("m, n, causal", [(900, 1000, False), (1000, 900, True)])
def test_error_without_forming_p(m: int, n: int, causal: bool, sharpness: float) -> None:
    """Larger than what is decomposed in full: the estimate lies above the true error, and that near the smallest."""
    q, k = sharpness * draw(m, 8), draw(n, 8, seed=1)
    p = softmax(q, k, causal=causal)
    approximation, dense = low_rank(p, 24), p.dense()
    assert not approximation.leading.exact
    smallest = torch.linalg.svdvals(dense)[24]
    true = spectral(dense - approximation.dense())
    assert (1 - 1e-9) * smallest <= true <= approximation.error
    assert true < 1.01 * smallest
    assert approximation.error < 1.5 * true


def test_error_where_the_spectrum_is_flat() -> None:
    """Singular values from 1 to 0.5: the iteration has not found them, and the estimate counts what it has not seen."""
    p = scale(shift((1000,), (0,)), torch.linspace(1, 0.5, 1000, dtype=torch.float64))
    approximation = low_rank(p, 24)
    true = spectral(p.dense() - approximation.dense())
    assert true > approximation.leading.values[24] + 1e-3
    assert true <= approximation.error <= 2 * true


def test_error_of_small_operators_is_the_next_singular_value() -> None:
    q, k = draw(2, 30, 4), draw(2, 40, 4, seed=1)
    p = references.softmax(q, k)
    for r in (1, 5, 30):
        approximation = low_rank(softmax(q, k), r)
        values = torch.nn.functional.pad(torch.linalg.svdvals(p), (0, 1))[..., r]
        torch.testing.assert_close(spectral(p - approximation.dense()), values, atol=1e-12, rtol=0)
        torch.testing.assert_close(approximation.error, values, atol=1e-12, rtol=0)
        assert approximation.leading.values.shape[-1] == min(r + 1, 30)


def test_a_causal_operator_becomes_one_that_looks_ahead() -> None:
    """A triangle with a nonzero diagonal has full rank, so none of rank r < n is causal; and rows do not sum to one."""
    p = softmax(draw(20, 4), draw(20, 4, seed=1), causal=True)
    assert torch.linalg.matrix_rank(p.dense()) == 20
    approximation = low_rank(p, 5)
    assert approximation.dense().triu(1).abs().max() > 1e-3
    assert approximation.claims == frozenset()
    assert (approximation.dense().sum(-1) - 1).abs().max() > 1e-3


def test_one_head_of_several() -> None:
    q, k, v = draw(2, 3, 30, 4), draw(2, 3, 30, 4, seed=1), draw(2, 3, 30, 5, seed=2)
    heads = [low_rank(softmax(q[:, 0], k[:, 0]), 4), window(q[:, 1], k[:, 1], 5), uniform(30, 30)]
    out = per_head(heads)(v)
    torch.testing.assert_close(out[:, 0], references.low_rank(references.softmax(q[:, 0], k[:, 0]), 4) @ v[:, 0])
    assert per_head(heads).cost(5).multiply_adds < softmax(q, k).cost(5).multiply_adds


def test_the_same_every_time_and_over_mapped_values() -> None:
    q, k, v = draw(900, 4), draw(900, 4, seed=1), draw(2, 900, 3, seed=2)
    first, second = (low_rank(softmax(q, k), 3) for _ in range(2))
    assert torch.equal(first(v[0]), second(v[0]))
    torch.testing.assert_close(torch.func.vmap(first)(v), first(v))


def test_rows_of_masked_queries_and_keys_stay_zero() -> None:
    key_mask = torch.arange(12) < 9
    approximation = low_rank(softmax(draw(12, 4), draw(12, 4, seed=1), key_mask=key_mask), 3)
    assert approximation.dense()[:, 9:].abs().max() < 1e-12


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((torch.eye(3), 1), InputError, "needs an attention operator, but got a Tensor"),
        ((uniform(4, 6), 0), ShapeError, r"r must be between 1 and min\(m, n\) = 4, but is 0"),
        ((uniform(4, 6), 5), ShapeError, r"r must be between 1 and min\(m, n\) = 4, but is 5"),
        ((uniform(4, 6), 1.5), InputError, "r must be a whole number, but is 1.5"),
    ],
)
def test_bad_input_is_named(arguments: tuple, error: type[HeadwiseError], text: str) -> None:
    with pytest.raises(error, match=f"LowRank: {text}"):
        low_rank(*arguments)
