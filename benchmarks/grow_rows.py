"""Losses by way and seed, kept in a file so that a comparison can be run a few seeds at a time; their intervals."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = T95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


class Rows:
    """{way: {seed: losses}}; `file` is read at the start and written after every seed."""

    def __init__(self, file: Path | None, part: str) -> None:
        self.file, self.part = file, part
        self.all = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.mine: dict[str, dict[str, list[float]]] = self.all.setdefault(part, {})

    def add(self, way: str, seed: int, losses: Sequence[float]) -> None:
        self.mine.setdefault(way, {})[str(seed)] = list(losses)

    def has(self, seed: int) -> bool:
        return bool(self.mine) and all(str(seed) in rows for rows in self.mine.values())

    def save(self) -> None:
        if self.file is not None:
            self.file.write_text(json.dumps(self.all, indent=1))

    def column(self, way: str, i: int) -> list[float]:
        return [losses[i] for _, losses in sorted(self.mine[way].items())]

    def print(self, *, against: str | None = None) -> None:
        """A line a way: the mean loss with its interval at each time; `against` adds paired differences from one."""
        for way, seeds in self.mine.items():
            times = range(len(next(iter(seeds.values()))))
            line = "   ".join(interval(self.column(way, i)) for i in times)
            if against is not None and way != against:
                paired = (
                    [a - b for a, b in zip(self.column(way, i), self.column(against, i), strict=True)] for i in times
                )
                line += "   | " + "   ".join(interval(each) for each in paired)
            print(f"  {way:34s} {line}")
