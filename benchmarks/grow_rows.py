"""Losses by method and seed, stored in a file so that a comparison can be run a few seeds at a time."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from headwise.outputs import write_json

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = T95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


class Rows:
    """{method: {seed: losses}}; `file` is read at the start and written after every seed."""

    def __init__(self, file: Path | None, part: str) -> None:
        self.file, self.part = file, part
        self.all_parts = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.losses: dict[str, dict[str, list[float]]] = self.all_parts.setdefault(part, {})

    def add(self, method: str, seed: int, losses: Sequence[float]) -> None:
        self.losses.setdefault(method, {})[str(seed)] = list(losses)

    def has(self, seed: int) -> bool:
        return bool(self.losses) and all(str(seed) in rows for rows in self.losses.values())

    def save(self) -> None:
        if self.file is not None:
            write_json(self.file, self.all_parts)

    def column(self, method: str, i: int) -> list[float]:
        return [losses[i] for _, losses in sorted(self.losses[method].items())]

    def print(self, *, against: str | None = None) -> None:
        """One line per method: the mean loss with its interval at each time; `against` adds paired differences."""
        for method, seeds in self.losses.items():
            times = range(len(next(iter(seeds.values()))))
            line = "   ".join(interval(self.column(method, i)) for i in times)
            if against is not None and method != against:
                paired = (
                    [a - b for a, b in zip(self.column(method, i), self.column(against, i), strict=True)] for i in times
                )
                line += "   | " + "   ".join(interval(each) for each in paired)
            print(f"  {method:34s} {line}")
