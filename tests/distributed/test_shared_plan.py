"""A plan made by several processes is the plan of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headwise.distributed.dealing import dealt, from_first
from headwise.errors import InputError
from headwise.replacement import Plan, plan
from tests.distributed.pool import Pool


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=40, intermediate_size=32, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    return LlamaForCausalLM(config).eval()


def texts() -> dict[str, list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    return {
        kind: [{"input_ids": torch.randint(low, 40, (1, 32), generator=generator)} for _ in range(3)]
        for kind, low in (("a", 0), ("b", 10), ("c", 20))
    }


def made(folder: Path | None) -> Plan:
    return plan(model(), texts(), tolerance=0.05, objective="memory", evaluations=3, partial_results=folder)


def shared(folder: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan of all processes, and that of this one alone."""
    together = made(folder).to_dict()
    is_open, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        alone = made(None).to_dict()
    finally:
        dist.is_initialized = is_open
    return together, alone


def without_times(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in ("timing", "exact_below")}


def test_two_processes_make_the_plan_of_one(two: Pool, tmp_path: Path) -> None:
    (first, alone), (second, _) = two.run(shared, tmp_path / "parts")
    assert first == second
    assert without_times(first) == without_times(alone)
    assert len(first["curve"]) > 1
    kept = len(list((tmp_path / "parts").iterdir()))
    again, _ = two.run(shared, tmp_path / "parts")[0]  # everything is there
    assert without_times(again) == without_times(first)
    assert len(list((tmp_path / "parts").iterdir())) == kept


def planned_apart() -> str:
    given = texts() if dist.get_rank() == 0 else {**texts(), "c": texts()["a"]}
    with pytest.raises(InputError) as error:
        plan(model(), given, tolerance=0.05, objective="memory", evaluations=1)
    return str(error.value)


def test_processes_with_other_texts_end_with_a_sentence(two: Pool) -> None:
    assert all("same texts and settings, but rank 1 has " in found for found in two.run(planned_apart))


def where() -> tuple[dict[str, int], int]:
    return dealt("abc", lambda key: dist.get_rank()), from_first(dist.get_rank)


def test_work_is_dealt_out(two: Pool) -> None:
    assert two.run(where) == [({"a": 0, "b": 1, "c": 0}, 0)] * 2
    assert dealt("ab", str.upper) == {"a": "A", "b": "B"}
    assert from_first(lambda: 7) == 7
