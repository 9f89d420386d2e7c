"""How receipts are measured: changes over nested outputs, evaluation mode, parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.cost import Cost
from headwise.errors import InputError
from headwise.models.receipt import Left, Receipt, counted_cost, evaluate, largest_change, parameter_count


def test_largest_change_over_nested_outputs() -> None:
    old = {"a": torch.tensor([1.0, -4.0]), "b": (torch.zeros(2), [torch.ones(1), "text"]), "empty": torch.zeros(0)}
    new = {"a": torch.tensor([1.5, -4.0]), "b": (torch.zeros(2), [torch.full((1,), 3.0), "text"]), "empty": None}
    assert largest_change(lambda: old, lambda: new) == (2.0, 4.0)


def test_evaluate_runs_in_evaluation_mode_and_restores_the_flags() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Sequential(nn.Linear(2, 2)).eval())
    x = torch.ones(3, 2)
    assert torch.equal(evaluate(model, x), model[1](x))  # pyright: ignore[reportArgumentType]
    assert [part.training for part in model.modules()] == [True, True, False, False]
    with pytest.raises(InputError, match=r"Sequential does not run on a probe of shape \(3, 5\)"):
        evaluate(model, torch.ones(3, 5))
    assert model.training


def test_lazy_parameters_count_as_none() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    assert parameter_count(model) == 9
    assert counted_cost(lambda: model[0](torch.ones(5, 2))).multiply_adds == 30


def test_a_receipt_prints_what_was_left_and_its_notes() -> None:
    left = (Left("2", "it is transposed"),)
    receipt = Receipt("net", 1, 1, Cost(2), Cost(2), 0.0, 1.0, left=left, notes=("no probe",))
    assert str(receipt).splitlines()[1:] == ["left 2: it is transposed", "no probe"]
    assert repr(receipt).endswith("of 1; 2 more lines in str())")
