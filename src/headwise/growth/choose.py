"""Which heads to widen, and by how much: the bottleneck where two halves of the data agree on it.

WHICH     heads by <R_a, R_b>, the cross-validated bottleneck; those within `SHARE` of the first
HOW MANY  leading directions that keep at least `AGREEMENT` of their strength on the half they were not found on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from headwise.errors import InputError
from headwise.growth.growth_event import HeadScore
from headwise.growth.solve import Problem, alignment, room, score

Key = tuple[str, int]
"""A head: the name of its layer, and its number."""

SHARE = 0.25
AGREEMENT = 0.3
"""Between what was seen where the width is a bottleneck (0.45 to 0.94) and where it is not (below 0.2)."""


def rank(problems: Mapping[Key, Problem]) -> list[HeadScore]:
    """All heads, the one that most wants to be wider first."""
    found = []
    for (layer, head), problem in problems.items():
        s = score(problem)
        found.append(HeadScore(layer, head, problem.present.width, s.raw, s.validated, s.share))
    return sorted(found, key=lambda s: -s.validated)


def directions(problem: Problem) -> int:
    """How many new dimensions the data agree on; at most as many as the head has, and as it has room for."""
    most = min(problem.present.width, problem.width_limit() - problem.present.width)
    if most < 1:
        return 0
    agreed = alignment(problem, most) >= AGREEMENT
    return int(agreed.long().cumprod(0).sum())


def choose(
    problems: Mapping[Key, Problem], p: int | Literal["auto"], heads: Sequence[Key] | Literal["auto"]
) -> dict[Key, int]:
    """New dimensions per head; empty when none is recommended.  What is asked for by name is checked, not judged."""
    if heads != "auto":
        wanted = {key: _named(problems, key) for key in heads}
        return {key: _asked(problem, key, p) for key, problem in wanted.items()}
    ordered = [s for s in rank(problems) if s.validated > 0]
    plan: dict[Key, int] = {}
    for s in ordered:
        if s.validated < SHARE * ordered[0].validated:
            break
        problem = problems[s.layer, s.head]
        count = directions(problem)
        if p != "auto":
            count = min(p, problem.width_limit() - problem.present.width) if count else 0
        if count:
            plan[s.layer, s.head] = count
    return plan


def _named(problems: Mapping[Key, Problem], key: Key) -> Problem:
    if key not in problems:
        known = ", ".join(f"({layer!r}, {head})" for layer, head in problems)
        raise InputError(f"grow: there is no head {key!r} with statistics; there are {known}")
    problem = problems[key]
    if not bool(problem.folds.any()):
        raise InputError(
            f"grow: the loss does not depend on the scores of head {key[1]} of {key[0]} (its gradient is zero on every "
            "batch observed), so there is nothing to grow it by"
        )
    return problem


def _asked(problem: Problem, key: Key, p: int | Literal["auto"]) -> int:
    count = max(1, directions(problem)) if p == "auto" else p
    room(problem, count)
    return count
