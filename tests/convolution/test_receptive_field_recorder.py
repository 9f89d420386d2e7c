"""Receptive fields of converted models are recorded and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from headwise.convolution import (
    ReceptiveFieldRecorder,
    convert,
    layer_receptive_fields,
    model_receptive_fields,
    soft,
)
from headwise.errors import InputError
from headwise.nn import GridAttention
from headwise.theory.receptive_fields import receptive_fields

CELLS = [(y, x) for y in (-1.0, 0.0, 1.0) for x in (-1.0, 0.0, 1.0)]


def test_the_fields_of_a_converted_convolution_are_its_kernel() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, stride=2, padding=1))
    fields = model_receptive_fields(convert(model)[0], torch.zeros(1, 1, 8, 8))
    assert set(fields) == {"0", "2"}
    for layer in fields.values():
        assert [f.centre for f in layer] == CELLS
    soft_fields = model_receptive_fields(convert(model, soft(6.0))[0], torch.zeros(1, 1, 9, 9))
    for f, cell in zip(soft_fields["0"], CELLS, strict=True):
        assert f.centre == pytest.approx(cell, abs=1e-2)


def test_a_moving_head_is_recorded_and_drawn(tmp_path: Path) -> None:
    model = cast(Any, convert(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)), soft(2.0))[0])
    recorder = ReceptiveFieldRecorder(lambda: model_receptive_fields(model, torch.zeros(1, 1, 9, 9)))
    for epoch in range(3):
        with torch.no_grad():
            model[0].centres[0] += 0.5
        recorder(epoch)
    path = [recorder.record[epoch]["0"][0].centre[0] for epoch in range(3)]
    assert path == pytest.approx([-0.5, 0.0, 0.5], abs=0.02)
    assert json.loads(json.dumps(recorder.to_json()))["2"]["0"][0]["centre"][0] == pytest.approx(0.5, abs=0.02)
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    recorder.png("0", tmp_path / "fields.png", panels=2)
    recorder.gif("0", tmp_path / "fields.gif")
    with image.open(tmp_path / "fields.gif") as gif:
        assert gif.n_frames == 3
    with image.open(tmp_path / "fields.png") as png:
        assert png.size[0] > 400
    with pytest.raises(InputError, match=r"no receptive fields of layer '7' are recorded, only of \['0'\]"):
        recorder.png("7", tmp_path / "none.png")


def test_content_heads_are_recorded_in_the_same_way() -> None:
    layer, x = GridAttention(8, 2), torch.randn(1, 8, 4, 5)
    recorder = ReceptiveFieldRecorder(lambda: {"content": receptive_fields(layer.operator(x), (4, 5))})
    recorder(0)
    assert len(recorder.record[0]["content"]) == 2


def test_other_layers_are_rejected() -> None:
    with pytest.raises(InputError, match="Linear is not a KernelAttention layer"):
        layer_receptive_fields(nn.Linear(1, 1), (3, 3))
