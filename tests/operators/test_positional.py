"""Attention by position: the product over axes, key masks, borders, and the limit in which it is a shift."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import DtypeError, NonFiniteError, ShapeError, UnsupportedError
from headwise.operators.claims import Claim
from headwise.operators.relative.positional import positional
from headwise.operators.relative.quadratic import bordered, log_width, quadratic, rotated, tables
from headwise.operators.relative.shift import Border, shift
from headwise.testing import references
from headwise.testing.contract import normal


def test_it_is_the_product_of_one_attention_an_axis() -> None:
    p = quadratic((3, 4), normal(2, seed=0), normal(2, seed=1))
    rows, columns = p.factors()
    torch.testing.assert_close(p.dense(), torch.kron(rows, columns), rtol=0, atol=1e-15)


def test_a_rotated_head_with_a_diagonal_precision_is_the_same_head_computed_densely() -> None:
    centres, widths = normal(3, 2, seed=0), normal(3, 2, seed=1)
    with pytest.warns(UserWarning, match=r"does not factor over the axes: 12 x 12 scores"):
        dense = rotated((3, 4), centres, torch.diag_embed((-2 * widths).exp()))
    torch.testing.assert_close(dense.dense(), quadratic((3, 4), centres, widths).dense(), rtol=0, atol=1e-12)
    assert dense.cost(8).multiply_adds > quadratic((3, 4), centres, widths).cost(8).multiply_adds


def test_a_rotated_head_can_be_masked() -> None:
    keep = torch.arange(6) % 2 == 0
    with pytest.warns(UserWarning, match="does not factor"):
        p = rotated(
            (2, 3),
            torch.zeros(2, dtype=torch.float64),
            torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64),
            key_mask=keep,
        )
    assert p.dense()[:, ~keep].abs().max() == 0
    assert Claim.STOCHASTIC in p.claims


def test_a_key_far_away_is_found_when_it_is_the_only_one() -> None:
    # exp(-20 * 30^2) is zero in any format: a numerator over a denominator would be 0 / 0
    keep = torch.zeros(961, dtype=torch.bool)
    keep[[5, 960]] = True
    p = quadratic((31, 31), torch.zeros(2, dtype=torch.float64), log_width(20.0).double(), key_mask=keep)
    dense = p.dense()
    nearest = torch.tensor([5 if _distance(q, 5) < _distance(q, 960) else 960 for q in range(961)])
    decided = torch.tensor([_distance(q, 5) != _distance(q, 960) for q in range(961)])
    assert torch.equal(dense.argmax(-1)[decided], nearest[decided])
    torch.testing.assert_close(dense.sum(-1), torch.ones(961, dtype=torch.float64))
    assert Claim.STOCHASTIC in p.claims


def _distance(q: int, k: int) -> int:
    return (q // 31 - k // 31) ** 2 + (q % 31 - k % 31) ** 2


def test_a_sequence_without_keys_gives_zeros_and_no_stochastic_claim() -> None:
    keep = torch.tensor([[True, True, True], [False, False, False]])
    centres = torch.zeros(1, dtype=torch.float64).requires_grad_()
    p = quadratic((3,), centres, torch.zeros(1, dtype=torch.float64), key_mask=keep)
    assert p.claims == {Claim.NONNEGATIVE}
    y = p(torch.ones(3, 2, dtype=torch.float64))
    assert y[1].abs().max() == 0
    y.sum().backward()
    assert centres.grad is not None
    assert centres.grad.isfinite().all()


@pytest.mark.parametrize("border", ["zeros", "replicate", "reflect", "circular"])
def test_a_sharp_head_is_the_shift_of_its_border(border: Border) -> None:
    for offset in ((1, -2), (0, 0), (-1, 1)):
        p = bordered(
            (4, 5),
            ((2, 2), (2, 2)),
            border,
            torch.tensor(offset, dtype=torch.float64),
            log_width(60.0).double(),
            queries=(4, 5),
        )
        torch.testing.assert_close(p.dense(), shift((4, 5), offset, border=border).dense().double(), rtol=0, atol=1e-12)


def test_without_a_border_a_sharp_head_tends_to_the_replicated_border() -> None:
    # there are no keys outside the image: a sharp head attends to the nearest pixel, not to a zero
    p = quadratic((4, 5), torch.tensor([2.0, -1.0], dtype=torch.float64), log_width(60.0).double())
    expected = shift((4, 5), (2, -1), border="replicate").dense().double()
    torch.testing.assert_close(p.dense(), expected, rtol=0, atol=1e-12)


def test_a_masked_head_with_a_border_keeps_the_null_keys() -> None:
    keep = torch.tensor([True, False, True])
    sharp = bordered(
        (3,), ((1, 1),), "zeros", torch.tensor([-1.0], dtype=torch.float64), log_width(60.0).double(), key_mask=keep
    )
    # query 0 attends to the null key before the grid; the key of query 2 is masked, so it takes the neighbours
    torch.testing.assert_close(
        sharp.dense(), torch.tensor([[0, 0, 0], [1, 0, 0], [0.5, 0, 0.5]], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_log_width_of_a_sharpness() -> None:
    alpha = torch.tensor(3.0, dtype=torch.float64)
    assert math.isclose(1 / (2 * log_width(alpha).exp().item() ** 2), 3.0)


def test_cost_grows_with_the_sides_and_not_with_the_cells() -> None:
    def cost(g: int) -> int:
        return quadratic((g, g), torch.zeros(2), torch.zeros(2)).cost(1).multiply_adds

    assert cost(64) == 8 * cost(32) == 2 * 64**3


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: positional([]), ShapeError, "at least one axis, got none"),
        (lambda: positional([torch.zeros(0, 3)]), ShapeError, r"scores of axis 0 has shape \(0, 3\)"),
        (lambda: positional([torch.zeros(2, 2), torch.zeros(2, 2).long()]), DtypeError, "must be floating point"),
        (lambda: positional([torch.full((2, 2), math.nan)]), NonFiniteError, "4 non-finite of 4"),
        (
            lambda: positional([torch.zeros(2, 3)], key_mask=torch.ones(4).bool()),
            ShapeError,
            r"key_mask has shape \(4,\), but there are n = 3 keys",
        ),
        (
            lambda: quadratic((2, 3), torch.zeros(2), torch.zeros(1), pair_mask=torch.ones(6, 6) > 0),  # pyright: ignore[reportCallIssue]
            UnsupportedError,
            "quadratic: does not support pair_mask; use softmax with the scores as attn_bias",
        ),
        (lambda: positional([torch.zeros(2, 3)], key_mask=torch.ones(3)), DtypeError, "key_mask must be boolean"),
        (
            lambda: quadratic((2, 3), torch.zeros(3), torch.zeros(1)),
            ShapeError,
            r"centres must be \(\*batch, 2\), but have shape \(3,\)",
        ),
        (lambda: quadratic((0, 3), torch.zeros(2), torch.zeros(1)), ShapeError, r"grid \(0, 3\)"),
        (
            lambda: quadratic((2, 3), torch.zeros(2), torch.zeros(1), stride=(1,)),
            ShapeError,
            "axis 'dimension' must agree, but grid has 2, queries has 2, stride has 1",
        ),
        (
            lambda: tables((2, 3), [torch.zeros(3), torch.zeros(4)]),
            ShapeError,
            r"axis 1 has distances -2 to 2, so its table needs 5 entries, but has shape \(4,\)",
        ),
        (
            lambda: rotated((2, 2), torch.zeros(2), torch.zeros(3, 3)),
            ShapeError,
            r"precision \(\*batch, 2, 2\), but they have shapes \(2,\) and \(3, 3\)",
        ),
    ],
)
def test_bad_input_is_rejected(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_the_reference_of_borders_against_values_by_hand() -> None:
    assert [references.border_cell(at, 3, "reflect") for at in range(-3, 6)] == [1, 2, 1, 0, 1, 2, 1, 0, 1]
    assert [references.border_cell(at, 3, "circular") for at in (-1, 3)] == [2, 0]
    assert [references.border_cell(at, 3, "replicate") for at in (-2, 4)] == [0, 2]
    assert references.border_cell(-1, 3, "zeros") is None
