"""Measurements by job and conditions in a JSON-lines file: each is kept as soon as it is made.

A job says what is measured (an operator, a length, a round), the conditions what a time depends on besides: a run
under the same conditions continues where an earlier one stopped, and times under others are not compared.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from headwise import __version__
from headwise.errors import InputError, shown
from headwise.outputs import append_line, read_lines
from headwise.reading import anything, fields, map_of, parse_json

_KEY = fields({"job": map_of(anything), "conditions": map_of(anything)})


@final
class Kept:
    """The results of one file under one set of conditions; without a file, those of this process.

    fresh  ignore what the file has from earlier runs
    """

    def __init__(self, file: Path | None, under: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.file, self.under = file, dict(under)
        self._results = {} if file is None or fresh else stored(file).get(as_key(under), {})

    def get(self, job: Mapping[str, Any]) -> Any:
        """The result of a job; None if there is none."""
        return self._results.get(as_key(job))

    def add(self, job: Mapping[str, Any], result: Any) -> None:
        self._results[as_key(job)] = result
        if self.file is not None:
            append_line(self.file, as_key({"job": dict(job), "conditions": self.under}), result)


def stored(file: Path) -> dict[str, dict[str, Any]]:
    """Results by conditions and job, as `as_key` writes both; conditions in the order of their last measurement."""
    results: dict[str, dict[str, Any]] = {}
    lines = read_lines(file)
    if not lines and file.exists() and file.stat().st_size:
        raise InputError(f"{shown(file)} is not a file of measurements by `headwise bench`; move it away")
    for key, result in lines.items():
        facts = parse_json(key, _KEY, shown(file))
        under = as_key(facts["conditions"])
        results[under] = {**results.pop(under, {}), as_key(facts["job"]): result}
    return results


def as_key(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, sort_keys=True)


def conditions(**settings: Any) -> dict[str, Any]:
    """The settings of a run, and what a time depends on besides."""
    return {
        **settings,
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "headwise": __version__,
        "torch": torch.__version__,
        "machine": _processor(),
    }


def _processor() -> str:
    """The name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
