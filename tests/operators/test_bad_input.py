"""Bad input is refused in headwise's own words: the operator, the axis and every size; never a raw torch error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.errors import DtypeError, HeadwiseError, InputError, NonFiniteError, ShapeError
from headwise.operators.base import AttentionOperator
from headwise.operators.compose import add, kronecker, per_head, product, scale
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product
from headwise.operators.relative.shift import shift
from headwise.operators.similarity import embedded_gaussian, gaussian
from headwise.operators.softmax import softmax
from headwise.operators.uniform import uniform
from headwise.testing import Case, strategies
from headwise.testing.strategies import Bad
from tests.operators.cases import CASES

Builder = Callable[..., AttentionOperator]


def concatenated(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
    """`concatenation` with a w that fits q and k, so that what is wrong with them is what is refused."""
    return concatenation(q, k, torch.ones(q.shape[-1] + k.shape[-1], dtype=q.dtype, device=q.device), **masks)


BUILDERS: dict[str, Builder] = {
    "Softmax": softmax,
    "gaussian": gaussian,
    "embedded": embedded_gaussian,
    "DotProduct": dot_product,
    "Concatenation": concatenated,
}
OWNERS = {"gaussian": "Softmax", "embedded": "(EmbeddedGaussian|Softmax)"}
MAY_DIFFER = {("Concatenation", strategies.wrong_width)}  # q and k of two widths are concatenated all the same


def refused(run: Callable[[], object], owner: str, *names: str) -> None:
    """`run` raises a HeadwiseError that begins with the operator and names every one of `names`."""
    with pytest.raises(HeadwiseError, match=rf"^{owner}: ") as caught:
        run()
    missing = [word for word in names if word not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"


@pytest.mark.parametrize("kind", strategies.BAD_TENSORS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_bad_queries_and_keys(name: str, kind: Callable[[], st.SearchStrategy[Bad]], data: st.DataObject) -> None:
    bad = data.draw(kind())
    if (name, kind) in MAY_DIFFER:
        assert BUILDERS[name](bad.q, bad.k).shape[-1] == bad.k.shape[-2]
    else:
        refused(lambda: BUILDERS[name](bad.q, bad.k), OWNERS.get(name, name), *bad.names)


@pytest.mark.parametrize("kind", strategies.BAD_MASKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_bad_masks(name: str, kind: Callable[[], st.SearchStrategy[Bad]], data: st.DataObject) -> None:
    bad = data.draw(kind())
    refused(lambda: BUILDERS[name](bad.q, bad.k, **bad.masks), OWNERS.get(name, name), *bad.names)


@pytest.mark.parametrize("name", BUILDERS)
@given(good=strategies.good())
def test_the_same_input_without_the_defect_is_taken(name: str, good: Bad) -> None:
    assert BUILDERS[name](good.q, good.k).shape == (*good.q.shape[:-1], good.k.shape[-2])


@given(bad=strategies.wrong_bias())
def test_bad_bias(bad: Bad) -> None:
    refused(lambda: softmax(bad.q, bad.k, **bad.masks), "Softmax", *bad.names)


ONE_EACH = {type(case.operator()): case for case in reversed(CASES)}


@pytest.mark.parametrize("case", ONE_EACH.values(), ids=lambda case: case.name)
@given(data=st.data())
def test_bad_values(case: Case, data: st.DataObject) -> None:
    """`op(v)` checks v against the operator, whichever operator it is."""
    op = case.operator()
    owner, (*batch, _, n) = type(op).__name__, op.shape
    rows, d = data.draw(st.integers(1, 2 * n).filter(lambda rows: rows != n)), data.draw(strategies.sizes)
    v = torch.ones(*batch, n, d, dtype=torch.float64)
    refused(lambda: op(torch.ones(*batch, rows, d, dtype=torch.float64)), owner, "'n'", f"{n}", f"{rows}")
    refused(lambda: op(v.flatten()), owner, str((v.numel(),)))
    if batch and batch[-1] > 1:
        other = batch[-1] + data.draw(strategies.sizes)
        refused(lambda: op(torch.ones(other, n, d, dtype=torch.float64)), owner, str(tuple(batch)), str((other,)))
    if op.like.numel():
        refused(lambda: op(v.float()), owner, "torch.float64", "torch.float32")
        refused(lambda: op(v.to("meta")), owner, "meta", "cpu")
    refused(lambda: op(v.long()), owner, "v must be floating point", "torch.int64")


def test_bad_sizes_of_operators_without_tensors() -> None:
    refused(lambda: uniform(0, 3), "Uniform", "m has 0", "n has 3", "empty")
    refused(
        lambda: uniform(2, 3, key_mask=torch.ones(4, dtype=torch.bool)),
        "Uniform",
        "key_mask has shape (4,)",
        "n = 3 keys",
    )
    refused(lambda: uniform(2, 3, key_mask=torch.ones(3)), "Uniform", "key_mask", "boolean", "torch.float32")
    refused(lambda: shift((3, 4), (1,)), "Shift", "'dimension'", "grid has 2", "offset has 1")
    refused(lambda: shift((3, 0), (1, 1)), "Shift", "(3, 0)")
    refused(lambda: shift((3,), (1,), border="wrap"), "Shift", "border", "'wrap'", "circular")  # type: ignore[arg-type]
    refused(lambda: shift((3,), (1,), stride=(0,)), "Shift", "stride", "(0,)")


@given(sizes=st.lists(st.integers(1, 6), min_size=4, max_size=4, unique=True))
def test_bad_compositions(sizes: list[int]) -> None:
    a, b, c, d = sizes
    left, right = uniform(a, b), uniform(c, d)
    refused(lambda: product(left, right), "Product", "'n'", str(b), str(c))
    refused(lambda: add(left, right), "Sum", "'m'", str(a), str(c))
    refused(lambda: add(left, uniform(a, d)), "Sum", "'n'", str(b), str(d))
    refused(lambda: per_head([left, right]), "PerHead", "'m'", str(a), str(c))
    refused(lambda: scale(left, torch.ones(a + 1)), "Scaled", "'m'", str(a), str(a + 1))
    batches = [softmax(torch.ones(size + 1, 2, 3), torch.ones(size + 1, 2, 3)) for size in (a, b)]
    for combine, owner in ((product, "Product"), (add, "Sum"), (kronecker, "Kronecker")):
        refused(lambda combine=combine: combine(*batches), owner, str((a + 1,)), str((b + 1,)))


@pytest.mark.parametrize("combine, owner", [(product, "Product"), (add, "Sum"), (kronecker, "Kronecker")])
def test_a_combination_of_nothing_is_refused(combine: Builder, owner: str) -> None:
    refused(combine, owner, "at least one")


def test_a_head_count_that_does_not_divide_is_refused() -> None:
    q, k = torch.ones(2, 5, 3, 4), torch.ones(2, 2, 3, 4)
    refused(lambda: softmax(q, k), "Softmax", "'h'", "5", "2")


@given(scale=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_scale_that_is_not_a_number_is_refused(scale: float) -> None:
    refused(lambda: softmax(torch.ones(2, 3), torch.ones(2, 3), scale=scale), "Softmax", "scale", str(scale))


@given(w=st.integers(1, 12).filter(lambda size: size != 7))
def test_a_weight_that_does_not_fit_the_concatenation_is_refused(w: int) -> None:
    q, k = torch.ones(5, 3), torch.ones(6, 4)
    refused(lambda: concatenation(q, k, torch.ones(w)), "Concatenation", f"({w},)", "7", "3", "4")


@pytest.mark.parametrize("build", [embedded_gaussian, dot_product], ids=["embedded_gaussian", "dot_product"])
def test_a_map_that_does_not_fit_is_refused(build: Builder) -> None:
    q, k = torch.ones(5, 4), torch.ones(6, 4)
    owner = "(EmbeddedGaussian|DotProduct)"
    refused(lambda: build(q, k, theta=torch.ones(3, 5)), owner, "q", "4", "5")
    refused(lambda: build(q, k, theta=torch.ones(3, 4), phi=torch.ones(2, 4)), "(Softmax|DotProduct)", "'k'", "3", "2")
    refused(lambda: build(q, k, phi=torch.ones(4)), owner, "k", "(4,)")
    refused(lambda: build(q, k, phi=lambda x: x[:2]), owner, "rows of k", "6", "2")


def test_every_complaint_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Softmax: axis 'k' must agree, but q has 3, k has 4"):
        softmax(torch.ones(2, 3), torch.ones(2, 4))
    for kind in (ShapeError, DtypeError, NonFiniteError, InputError):
        assert issubclass(kind, HeadwiseError)
    assert issubclass(HeadwiseError, ValueError)
