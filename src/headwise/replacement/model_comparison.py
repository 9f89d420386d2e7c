"""Two models on the same texts: how far their answers are apart, and how long each takes.

Drift is that of `trial`: one minus the cosine of the mean final states, or the distance of the losses of a decoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from headwise.errors import InputError
from headwise.models.load import LoadedModel, load_model
from headwise.models.run import run_model
from headwise.replacement.install.saved import load
from headwise.replacement.planning.drift import difference, pooled_states, token_loss


@final
@dataclass(frozen=True)
class Apart:
    """Drift and seconds of each text; `operators` counts what the second model's heads were replaced by."""

    old: str
    new: str
    measure: str
    drifts: list[float]
    seconds_old: list[float]
    seconds_new: list[float]
    operators: dict[str, int]

    @property
    def drift(self) -> float:
        return sum(self.drifts) / len(self.drifts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "drift": self.drift}


def is_model(path: Path) -> bool:
    """A directory that save_pretrained wrote, and not one that examine wrote."""
    return path.is_dir() and (path / "config.json").is_file() and not (path / "report.json").exists()


def open_model(path: Path) -> LoadedModel:
    """A model's directory, rewritten or not."""
    import json

    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path / 'config.json'}: {error}") from error
    if isinstance(config, dict) and isinstance(config.get("headwise"), dict):
        return LoadedModel(load(path).eval(), path.resolve().name, path)
    return load_model(str(path), with_head=True)


def apart(
    old: LoadedModel, new: LoadedModel, batches: Sequence[Any], *, progress: Callable[[int], None] | None = None
) -> Apart:
    """Both models on every batch, one after the other, so that a busy machine disturbs both."""
    losses = all(hasattr(x.model, "lm_head") for x in (old, new)) and isinstance(batches[0], Mapping)
    measure = token_loss if losses and "input_ids" in batches[0] else pooled_states
    drifts: list[float] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    for index, batch in enumerate(batches):
        answers = []
        for loaded, times in zip((old, new), seconds, strict=True):
            output, took = _timed(loaded.model, batch)
            times.append(took)
            answers.append(measure(loaded.model, batch, output))
        if answers[0].shape != answers[1].shape:
            shapes = " and ".join(str(tuple(x.shape)) for x in answers)
            raise InputError(f"{old.name} and {new.name} answer with different sizes, {shapes}; compare like with like")
        drifts += difference(*answers).tolist()
        if progress is not None:
            progress(index + 1)
    kind = "loss" if measure is token_loss else "cosine"
    return Apart(old.name, new.name, kind, drifts, *seconds, _operators(new.model))


def _timed(model: nn.Module, batch: Any) -> tuple[Any, float]:
    with torch.no_grad():
        start = time.perf_counter()
        output = run_model(model, batch)
        return output, time.perf_counter() - start


def _operators(model: nn.Module) -> dict[str, int]:
    sites = (getattr(getattr(model, "config", None), "headwise", None) or {}).get("sites", {})
    found: dict[str, int] = {}
    for site in sites.values():
        for choice in site["heads"]:
            found[choice["kind"]] = found.get(choice["kind"], 0) + 1
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
