"""Running a model leaves it as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.models.run import eval_mode, first_sequence, run_model


def test_eval_mode_restores_every_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()

    def fail() -> None:
        with eval_mode(model):
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
