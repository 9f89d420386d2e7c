"""What a long search has found so far, written as it goes, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import InputError
from headwise.replacement.choice import Choice

Fits = dict[Choice, tuple[dict[str, Tensor], Tensor]]


class Memory:
    """Fits of each site, drifts of single heads, drifts of whole plans; without a directory, for this run alone.

    key   tells one search from another; a directory that holds another's work is refused, not mixed in
    """

    def __init__(self, directory: Path | None, key: str) -> None:
        self.directory = directory
        self.drifts: dict[str, Any] = {}
        self.wholes: dict[str, Any] = {}
        if directory is None:
            return
        mark = directory / "key"
        if mark.exists() and mark.read_text(encoding="utf-8") != key:
            raise InputError(
                f"{directory} holds the unfinished work of another model, other texts or other settings; "
                "name another directory, or begin anew"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            mark.write_text(key, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write to {directory}: {error.strerror or error}; choose another directory"
            ) from error
        self.drifts, self.wholes = _lines(directory / "drifts.jsonl"), _lines(directory / "plans.jsonl")

    def fitted(self, site: str) -> Fits | None:
        """What was fitted to a site, or under any other name."""
        if self.directory is None or not (file := self._file(site)).exists():
            return None
        rows = torch.load(file, weights_only=True)
        return {Choice.from_dict(row["choice"]): (row["tensors"], row["errors"]) for row in rows}

    def keep_fitted(self, site: str, fits: Fits) -> None:
        if self.directory is None:
            return
        rows = [{"choice": c.to_dict(), "tensors": own, "errors": error} for c, (own, error) in fits.items()]
        beside = self._file(site).with_suffix(f".{os.getpid()}.part")
        torch.save(rows, beside)
        beside.replace(self._file(site))

    def drift(self, key: str) -> tuple[float, Tensor | None] | None:
        """What one head's replacement did, and which way."""
        found = self.drifts.get(key)
        if found is None:
            return None
        drift, way, shape = found
        return drift, None if way is None else _unpacked(way).view(shape)

    def keep_drift(self, key: str, drift: float, way: Tensor | None) -> None:
        value = [drift, None if way is None else _packed(way), None if way is None else list(way.shape)]
        self._append("drifts.jsonl", key, value)
        self.drifts[key] = value

    def whole(self, key: str) -> tuple[float, float] | None:
        found = self.wholes.get(_short(key))
        return None if found is None else (found[0], found[1])

    def keep_whole(self, key: str, value: tuple[float, float]) -> None:
        self._append("plans.jsonl", _short(key), list(value))
        self.wholes[_short(key)] = list(value)

    def _append(self, name: str, key: str, value: Any) -> None:
        if self.directory is not None:
            with (self.directory / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")

    def _file(self, site: str) -> Path:
        assert self.directory is not None
        return self.directory / f"fit-{_short(site)}.pt"


def _packed(x: Tensor) -> str:
    return base64.b64encode(x.float().contiguous().numpy().tobytes()).decode()


def _unpacked(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _lines(file: Path) -> dict[str, Any]:
    """Whole lines only: the last may have been cut off."""
    found: dict[str, Any] = {}
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                key, value = json.loads(line)
            except ValueError:
                continue
            found[key] = value
    return found
