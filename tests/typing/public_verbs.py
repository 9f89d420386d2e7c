"""What a type checker sees of the verbs: this file is checked by pyright, never run."""

from typing import assert_type

from torch import Tensor, nn

import headwise


def verbs(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    examination = headwise.examine(model, batches)
    assert_type(examination, headwise.Examination)
    plan = headwise.plan(model, batches, tolerance=0.05)
    assert_type(plan, headwise.Plan)
    rewritten, receipt = headwise.rewrite(model, plan)
    assert_type(rewritten, nn.Module)
    assert_type(receipt, headwise.Receipt)
    converted, conversion = headwise.convert(model)
    assert_type(converted, nn.Module)
    assert_type(conversion, headwise.Receipt)
    assert_type(headwise.verify(), headwise.Ledger)
    assert_type(headwise.verify(model, batches), headwise.ModelAudit)
