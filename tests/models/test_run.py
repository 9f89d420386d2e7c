"""Running a model leaves it as it was, and a fingerprint changes with whatever a result depends on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import NonFiniteError
from headwise.models.fingerprint import check_weights, fingerprint
from headwise.models.run import as_it_was, first_sequence, run_model


def test_as_it_was_restores_every_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()

    def fail() -> None:
        with as_it_was(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize("kind", ["keywords", "positions", "tensor"])
def test_the_first_sequence_of_every_form_of_batch(kind: str) -> None:
    x = torch.randn(3, 4)
    batch = {"keywords": {"input": x}, "positions": [x], "tensor": x}[kind]
    out = run_model(nn.Identity(), first_sequence(batch, torch.float64))
    torch.testing.assert_close(out, x[:1].double())


def test_a_fingerprint_depends_on_weights_settings_and_batches() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    batch = {"x": torch.arange(3)}
    prints = [
        fingerprint(model),
        fingerprint(other),
        fingerprint(model, {"seed": 1}),
        fingerprint(model, None, [batch]),
        fingerprint(model, None, [{"x": torch.arange(3) + 1}]),
        fingerprint(model, None, [{"y": torch.arange(3)}]),
        fingerprint(model, None, [torch.arange(3), torch.arange(2)]),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(model, {}, [{"x": torch.arange(3)}]) == fingerprint(model, None, [batch])


def test_non_finite_weights_are_named() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = torch.inf
    with pytest.raises(NonFiniteError, match="weight 'bias' has 1 non-finite of 2 entries"):
        check_weights(model)
