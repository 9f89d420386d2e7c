"""Hash a model, its batches and the settings of a run, so that results of different runs are never mixed."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import NonFiniteError
from headwise.models.run import Batch, map_batch


def check_weights(model: nn.Module) -> None:
    """Raise NonFiniteError if a weight is NaN or infinite, which would make every measure NaN."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
            bad = int((~weight.detach().isfinite()).sum())
            raise NonFiniteError(
                f"weight {name!r} has {bad} non-finite of {weight.numel()} entries; load finite weights"
            )


def fingerprint(model: nn.Module, settings: Mapping[str, Any] | None = None, batches: Iterable[Batch] = ()) -> str:
    """A hash of what a result depends on: names, shapes and some entries of the weights, settings, and batches."""
    digest = hashlib.sha256(json.dumps(dict(settings or {}), sort_keys=True, default=str).encode())
    for name, weight in itertools.islice(model.state_dict().items(), 200):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(_bytes(weight.flatten()[:16].double()) if weight.is_floating_point() else b"")

    def add(x: Tensor) -> Tensor:
        digest.update(f"{x.dtype}{tuple(x.shape)}".encode() + _bytes(x))
        return x

    for batch in batches:
        digest.update(repr(list(batch)).encode() if isinstance(batch, Mapping) else b"")
        map_batch(add, batch)
    return digest.hexdigest()[:16]


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def versions() -> dict[str, str]:
    """Versions of headwise, torch, Python, and transformers if it is imported."""
    import headwise

    found = {"headwise": headwise.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return found
