"""Rows of several tensors, one behind the other: values and gradients of runs are those of torch's index_select."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.distributed import slices


@pytest.mark.parametrize("many", [slices.MANY_RUNS, 2], ids=["runs", "row by row"])
@settings(max_examples=60)
@given(chosen=st.lists(st.integers(0, 11), max_size=20) | st.just(list(range(7))) | st.just(list(range(2, 9))))
def test_rows_and_their_gradients(many: int, chosen: list[int]) -> None:
    index, tensors = torch.tensor(chosen, dtype=torch.int64), [torch.randn(2, n, 3).requires_grad_() for n in (7, 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "MANY_RUNS", many)
        found = slices._rows(index, *tensors)
    expected = torch.cat(tensors, dim=-2).index_select(-2, index)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    pull = torch.randn_like(expected)
    gradients = [torch.autograd.grad(x, tensors, pull, materialize_grads=True) for x in (found, expected)]
    torch.testing.assert_close(*gradients)
