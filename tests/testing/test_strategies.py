"""What the strategies draw is what they say, and nothing but them needs hypothesis."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product
from headwise.operators.softmax import softmax
from headwise.testing import references, strategies
from headwise.testing.strategies import Bad


@given(strategies.queries_keys_and_values())
def test_drawn_tensors_belong_together(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = drawn
    assert q.shape[-1] == k.shape[-1]
    assert k.shape[:-1] == v.shape[:-1]
    assert torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]) == k.shape[:-2]


@given(strategies.tensors(2, 3), strategies.dtypes)
def test_tensors_have_the_shape_and_the_dtype_asked_for(x: Tensor, dtype: torch.dtype) -> None:
    assert (x.shape, x.dtype) == ((2, 3), torch.float64)
    assert dtype.is_floating_point


@pytest.mark.parametrize("kind", [*strategies.BAD_TENSORS, *strategies.BAD_MASKS], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_bad_input_says_what_is_wrong_with_it(kind, data: st.DataObject) -> None:
    bad = data.draw(kind())
    assert isinstance(bad, Bad)
    assert bad.names
    assert repr(bad).startswith(f"{bad.what}: q ")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["softmax", "dot_product", "concatenation"])
@given(data=st.data())
def test_any_shape_and_any_mask(name: str, causal: bool, data: st.DataObject) -> None:
    """apply, adjoint and claims of the exact forms, on whatever shapes, masks and padding hypothesis finds."""
    q, k, v = data.draw(strategies.queries_keys_and_values())
    *batch, n, width = k.shape
    m = q.shape[-2]
    options: dict[str, Any] = {"causal": causal}
    if data.draw(st.booleans()):
        options["pair_mask"] = data.draw(strategies.masks(*data.draw(strategies.broadcasting(tuple(batch))), m, n))
    if data.draw(st.booleans()):
        options["key_mask"] = data.draw(strategies.masks(*batch, n))
    extra = (data.draw(strategies.tensors(2 * width)),) if name == "concatenation" else ()
    builders = {"softmax": softmax, "dot_product": dot_product, "concatenation": concatenation}
    op = builders[name](q, k, *extra, **options)
    p = getattr(references, name)(q, k, *extra, **options).expand(op.shape)
    u = data.draw(strategies.tensors(*batch, m, 2))
    torch.testing.assert_close(op(v), p @ v, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(op.adjoint(u), p.mT @ u, rtol=1e-9, atol=1e-9)
    rows = p.sum(-1)
    stochastic = bool((p >= 0).all()) and torch.allclose(rows, torch.ones_like(rows), rtol=0, atol=1e-9)
    assert stochastic or "STOCHASTIC" not in {claim.name for claim in op.claims}
    assert name != "softmax" or not stochastic or "STOCHASTIC" in {claim.name for claim in op.claims}


def test_only_strategies_needs_hypothesis() -> None:
    for file in Path(strategies.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            needs = any(name.split(".")[0] == "hypothesis" for name in names)
            assert not needs or file.name == "strategies.py", f"{file.name} imports hypothesis"
            assert "headwise.testing.strategies" not in names, f"{file.name} imports strategies, and so hypothesis"
