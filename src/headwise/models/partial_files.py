"""Partial results as files: each carries the key of its run and a checksum, and is checked when it is read."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch

from headwise.errors import InputError, shown
from headwise.models.fingerprint import content_hash
from headwise.models.gate import load_tensors
from headwise.outputs import atomic, writing


def save_partial(path: Path, run: str, value: Any) -> None:
    """Write tensors, plain values, and lists and dicts of them as a partial result of the run with this key."""
    written = io.BytesIO()  # torch's own writer of files ends the process when the disk is full
    torch.save({"run": run, "value": value, "sha256": content_hash(value)}, written)
    with atomic(path, flush=False) as temporary, writing(path):
        temporary.write_bytes(written.getbuffer())


def load_partial(path: Path, run: str) -> Any | None:
    """The value of `save_partial`; None if there is no file or it is damaged, which is logged.

    Raises InputError if it is the result of another run.
    """
    if not path.exists():
        return None
    try:
        saved = load_tensors(path)
        if saved["sha256"] != content_hash(saved["value"]):
            raise ValueError("its checksum does not match")
        other, value = saved["run"], saved["value"]
    except (InputError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        log_damaged(path, reason)
        return None
    if other != run:
        raise InputError(
            f"{shown(path)} is a partial result of another model, other inputs or other settings, or of another "
            "version; start over without it"
        )
    return value


def log_damaged(path: Path, reason: str) -> None:
    logging.getLogger("headwise").warning(f"{shown(path)} is damaged ({reason}) and is measured again")
