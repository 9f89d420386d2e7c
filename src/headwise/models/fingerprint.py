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


def check_weights(model: nn.Module) -> None:
    """Every weight is a number: a NaN would make every measure NaN without saying why."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
            bad = int((~weight.detach().isfinite()).sum())
            raise NonFiniteError(
                f"weight {name!r} has {bad} non-finite of {weight.numel()} entries; load sound weights"
            )


def fingerprint(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """Tells one examination from another, so that unfinished work is never mixed: shapes, some weights, settings."""
    digest = hashlib.sha256(json.dumps(dict(settings), sort_keys=True, default=str).encode())
    for name, weight in itertools.islice(model.state_dict().items(), 200):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.flatten()[:16].double().numpy().tobytes() if weight.is_floating_point() else b"")
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    import headwise

    found = {"headwise": headwise.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return found


def digest(batches: Iterable[Any]) -> str:
    """Tells one set of batches from another."""
    found = hashlib.sha256()
    for batch in batches:
        parts = batch.items() if isinstance(batch, Mapping) else [("", batch)] if isinstance(batch, Tensor) else batch
        for part in parts:
            for x in part if isinstance(part, tuple) else (part,):
                if isinstance(x, Tensor):
                    found.update(f"{x.dtype}{tuple(x.shape)}".encode())
                    found.update(x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
                else:
                    found.update(repr(x).encode())
    return found.hexdigest()
