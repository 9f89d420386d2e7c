"""Compare two models on the same texts: |difference| of losses, or 1 - cosine of pooled states, and their times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.gate import UNTRUSTED, Trust
from headwise.models.load import LoadedModel, load_model
from headwise.models.run import as_it_was, run_model
from headwise.progress import Progress, reported
from headwise.reading import anything, map_of, read_json
from headwise.replacement.install.saved import load
from headwise.replacement.planning.drift import CHUNK, PooledStates


@final
@dataclass(frozen=True)
class ModelDifference:
    """Drift and seconds of each text; `operators` counts the kinds of the replaced heads of the second model."""

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


def is_examination(spec: str) -> bool:
    """Whether `spec` is a directory that examine wrote, or the report.json in it; anything else names a model."""
    path = Path(spec)
    return (path / "report.json").is_file() or (path.suffix == ".json" and path.is_file())


def open_model(spec: str, trust: Trust = UNTRUSTED, **options: Any) -> LoadedModel:
    """The model that `spec` names, rewritten or not; options as in `load_model`."""
    path = Path(spec)
    if (path / "config.json").is_file():
        what = "a directory that save_pretrained wrote"
        if "headwise" in read_json(path / "config.json", map_of(anything), what, foreign=True):
            return LoadedModel(load(path, trust=trust).eval(), path.resolve().name, path, trust=trust)
    return load_model(spec, with_head=True, trust=trust, **options)


def compare_models(
    old: LoadedModel, new: LoadedModel, batches: Sequence[Any], *, progress: Progress | bool | None = None
) -> ModelDifference:
    """Run both models on every batch, alternating, so that other load affects both times."""
    losses = all(hasattr(x.model, "lm_head") for x in (old, new)) and isinstance(batches[0], Mapping)
    losses = losses and "input_ids" in batches[0]
    states = PooledStates()
    drifts: list[float] = []
    seconds: tuple[list[float], list[float]] = ([], [])
    with reported(progress) as report, as_it_was(old.model), as_it_was(new.model), torch.no_grad():
        for index, batch in enumerate(batches):
            outputs = []
            for loaded, times in zip((old, new), seconds, strict=True):
                start = time.perf_counter()
                outputs.append(token_loss(loaded.model, batch) if losses else states.run(loaded.model, batch))
                times.append(time.perf_counter() - start)
            if outputs[0].shape != outputs[1].shape:
                shapes = " and ".join(str(tuple(x.shape)) for x in outputs)
                raise InputError(f"the outputs of {old.name} and {new.name} have different shapes, {shapes}")
            a, b = outputs
            drifts += ((b - a).abs() if losses else states.drift(old.model, batch, a, b).flatten()).tolist()
            report("running both models", index + 1, len(batches))
    return ModelDifference(old.name, new.name, "loss" if losses else "cosine", drifts, *seconds, _operators(new.model))


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean loss per predicted token: (b,)"""
    ids, logits = batch["input_ids"], run_model(model, batch).logits
    losses = [
        F.cross_entropy(part.float().mT, label, reduction="none")
        for part, label in zip(logits[:, :-1].split(CHUNK, 1), ids[:, 1:].split(CHUNK, 1), strict=True)
    ]
    return torch.cat(losses, 1).double().mean(-1)


def _operators(model: nn.Module) -> dict[str, int]:
    """Number of heads of each kind, most frequent first."""
    sites = (getattr(getattr(model, "config", None), "headwise", None) or {}).get("sites", {})
    return dict(Counter(choice["kind"] for site in sites.values() for choice in site["heads"]).most_common())
