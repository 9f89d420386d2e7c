"""The page of a history: its data and its files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.examination.monitor import Alarm, Head, History
from headwise.examination.monitor.history import NAMES
from headwise.examination.monitor.history_page import MOST_STEPS, history_page, write_history


def written(steps: int = 12, layers: int = 3, heads: int = 4) -> History:
    generator = torch.Generator().manual_seed(0)
    history = History("Net")
    for step in range(steps):
        rows = torch.rand(layers * heads, len(NAMES), generator=generator)
        rows[:, 0] = 1.3 ** (step % 12)
        if step % 4:
            rows[:, -1] = math.nan
        names = [Head(f"layers.{i}.attn", j) for i in range(layers) for j in range(heads)]
        history.add(10 * step, dict(zip(names, rows.tolist(), strict=True)))
        history.losses.append((10 * step, 3 - 0.1 * step))
    history.alarms.append(Alarm(70, "logit growth", "layers.1.attn", 2, "layers.1.attn head 2: the largest score is 6"))
    return history


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_the_numbers() -> None:
    history = written()
    data = data_of(history_page(history))
    assert data["steps"] == history.steps
    assert data["alarms"] == [
        {
            "step": 70,
            "kind": "logit growth",
            "message": "layers.1.attn head 2: the largest score is 6",
            "place": 7,
            "index": 6,
        }
    ]
    torch.testing.assert_close(torch.tensor(data["values"]["entropy"]), history.series("entropy"), rtol=1e-3, atol=0)
    assert data["heads"][6] == {"layer": "layers.1.attn", "label": "layers.1", "head": 2}
    assert data["left_out"] == 0


def test_long_runs_keep_the_last_step_and_those_with_an_alarm() -> None:
    history = written(steps=2000, layers=1, heads=1)
    history.alarms = [Alarm(12340, "not finite", "layers.0.attn", 0, "x")]
    data = data_of(history_page(history))
    assert MOST_STEPS <= len(data["steps"]) <= MOST_STEPS + 1
    assert {0, 12340, 19990} <= set(data["steps"])
    assert data["steps"][data["alarms"][0]["place"]] == 12340
    assert data["left_out"] == 2000 - len(data["steps"])
    assert len(data["losses"]) == MOST_STEPS


def test_heads_that_appear_later_stay_with_their_layer() -> None:
    history = History("Net")
    row = [1.0] * len(NAMES)
    history.add(0, {Head("a", 0): row, Head("b", 0): row})
    history.add(1, {Head("a", 0): row, Head("b", 0): row, Head("a", 1): [2.0] * len(NAMES)})
    data = data_of(history_page(history))
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [("a", 0), ("a", 1), ("b", 0)]
    assert data["values"]["entropy"] == [[1.0, None, 1.0], [1.0, 2.0, 1.0]]


def test_files_are_replaced_only_with_force(tmp_path: Path) -> None:
    page, numbers = write_history(written(), tmp_path / "page")
    assert History.load(numbers).to_dict() == written().to_dict()
    with pytest.raises(HeadwiseError, match="force"):
        write_history(written(), tmp_path / "page")
    write_history(written(), tmp_path / "page", force=True)
    assert page.stat().st_size < 100_000


def test_an_empty_history_has_no_page() -> None:
    with pytest.raises(HeadwiseError, match="no measurement to show"):
        history_page(History("Net"))
