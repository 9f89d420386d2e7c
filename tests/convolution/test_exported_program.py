"""Exported programs: convolutions are found in the graph, shapes that were dynamic stay dynamic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.convolution import soft
from headwise.convolution.exported_program import convert_exported
from headwise.errors import InputError
from tests.convolution.test_conversion import small_cnn


class Branches(nn.Module):
    """The same convolution twice, one with 'same' padding, one that reflects, and one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv1d(2, 2, 3, padding="same", dilation=2)
        self.reflect = nn.Conv1d(2, 4, 5, padding=2, padding_mode="reflect", bias=False)
        self.up = nn.ConvTranspose1d(4, 1, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.reflect(self.twice(self.twice(x).relu())))


def test_a_program_with_a_dynamic_batch() -> None:
    model, x = small_cnn().eval(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("b", max=64)},))
    new, receipt = convert_exported(program)
    more = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(new.module()(more), model(more))
    assert len(receipt.parts) == 3
    assert receipt.parameters_before == receipt.parameters_after == sum(p.numel() for p in model.parameters())
    assert receipt.cost_before == receipt.cost_after
    assert receipt.largest_change < 1e-5


def test_soft_heads_leave_no_convolution_in_the_graph() -> None:
    model, x = small_cnn().eval(), torch.randn(2, 3, 8, 8)
    new, receipt = convert_exported(torch.export.export(model, (x,)), soft(25.0))
    targets = {str(node.target) for node in new.graph.nodes if node.op == "call_function"}
    assert not any("conv" in target for target in targets), targets
    torch.testing.assert_close(new.module()(x), model(x), rtol=1e-4, atol=1e-5)
    assert receipt.parameters_after > receipt.parameters_before  # centres and widths


def test_shared_padded_and_transposed() -> None:
    model, x = Branches().eval(), torch.randn(2, 2, 11)
    new, receipt = convert_exported(torch.export.export(model, (x,)))
    torch.testing.assert_close(new.module()(x), model(x))
    assert len(receipt.parts) == 2
    assert len(receipt.left) == 1
    assert "columns of P" in receipt.left[0].why


def test_a_program_without_convolutions() -> None:
    with pytest.raises(InputError, match="nothing to convert"):
        convert_exported(torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)))
