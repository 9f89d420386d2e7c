"""How long a plan is searched for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Effort:
    """How long to try: steps of each fit, texts and options for each head alone, whole plans measured."""

    steps: int = 120
    texts: int = 4
    options: int = 7
    evaluations: int = 120
    quick: bool = False


QUICK = Effort(steps=60, texts=2, options=4, evaluations=30, quick=True)
