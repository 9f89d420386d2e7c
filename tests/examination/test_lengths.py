"""Kinds at several lengths, and what is said about heads whose kind depends on the length."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import InputError
from headwise.examination import examine, with_lengths
from tests.examination.measure import planted_heads
from tests.models.tiny_models import ALL


def window_of_16(ids: torch.Tensor) -> torch.Tensor:
    """Attends evenly to the 16 tokens before and after: to all of a short text."""
    offset = torch.arange(len(ids))[None] - torch.arange(len(ids))[:, None]
    return torch.where(offset.abs() <= 16, 0.0, -30.0)


def test_a_window_is_everything_in_a_short_text() -> None:
    model = planted_heads.Planted(window_of_16)
    batches_of = {n: [{"input_ids": planted_heads.text(n, seed)} for seed in range(2)] for n in (16, 64, 200)}
    seen: list[tuple[str, int, int | None]] = []
    found = with_lengths(examine(model, batches_of[200]), model, batches_of, progress=lambda *step: seen.append(step))
    assert found.by_length["lengths"] == [16, 64, 200]
    assert found.by_length["kinds"]["16"] == ["uniform"]
    assert found.by_length["kinds"]["200"] == [found.records[0].kind] != ["uniform"]
    assert found.headline[-1].startswith(
        "1 of 1 heads change their kind between 16, 64 and 200 tokens, most often from"
    )
    assert seen[-1] == ("judging kinds at other lengths", 6, 6)
    assert seen == sorted(seen)


def test_kinds_that_stay_are_said_to_stay() -> None:
    model = planted_heads.Planted(planted_heads.previous)
    batches_of = {n: [{"input_ids": planted_heads.text(n)}] for n in (32, 64)}
    found = with_lengths(examine(model, batches_of[64]), model, {32: batches_of[32]})
    assert found.by_length == {"lengths": [32, 64], "kinds": {"32": ["positional"], "64": ["positional"]}}
    assert found.headline[-1] == "All 1 heads have the same kind at 32 and 64 tokens."


def test_batches_of_another_model_are_refused() -> None:
    model, batch = ALL["bert"]()
    other, _ = ALL["gpt2"]()
    examined = examine(model.eval(), [batch])
    with pytest.raises(InputError, match="with_lengths: the model has"):
        with_lengths(examined, other.eval(), {20: [{"input_ids": batch["input_ids"][:, :20]}]})
