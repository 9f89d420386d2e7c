"""Independent work dealt out over processes: each computes some of it, and all have the results.

    dealt(keys, compute)     {key: compute(key)}, keys i, i + P, i + 2 P, ... computed by rank i
    from_first(compute)      compute() of rank 0, on every rank: what was measured by the clock must agree
    same_on_all(facts)       an error on every rank, unless all have the same

Without torch.distributed, or with one process, everything is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from headwise.distributed.collectives import Ranks
from headwise.errors import InputError

K = TypeVar("K")
T = TypeVar("T")


def several() -> Ranks | None:
    """All processes, if there is more than one."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return Ranks.of(None)


def dealt(keys: Iterable[K], compute: Callable[[K], T]) -> dict[K, T]:
    """{key: compute(key)} in the order of the keys, which are the same on all ranks."""
    keys, ranks = list(keys), several()
    if ranks is None:
        return {key: compute(key) for key in keys}
    ranks, own = ranks.introduced(), {}
    for key in keys[ranks.rank :: ranks.size]:
        ranks.check()
        own[key] = compute(key)
    found: list[Any] = [None] * ranks.size
    ranks.call(dist.all_gather_object, found, own)
    together = {key: value for part in found for key, value in part.items()}
    return {key: together[key] for key in keys}


def from_first(compute: Callable[[], T]) -> T:
    """compute() of rank 0."""
    ranks = several()
    if ranks is None:
        return compute()
    found: list[Any] = [compute() if ranks.rank == 0 else None]
    ranks.introduced().call(dist.broadcast_object_list, found, src=0)
    return found[0]


def same_on_all(facts: Mapping[str, object]) -> None:
    """InputError on every rank that names what is not the same on all: their results would be put together."""
    if (ranks := several()) is None:
        return
    found: list[Any] = [None] * ranks.size
    ranks.introduced().call(dist.all_gather_object, found, dict(facts))
    for name in facts:
        other = next((rank for rank, theirs in enumerate(found) if theirs.get(name) != found[0].get(name)), None)
        if other is not None:
            raise InputError(
                f"all processes must have the same {name}, but rank {other} has {_short(found[other][name])}, and rank "
                f"0 {_short(found[0][name])}; give all of them the same files and arguments"
            )


def _short(fact: object) -> str:
    """Hashes by their beginning."""
    return f"{fact[:8]}…" if isinstance(fact, str) and len(fact) > 16 else str(fact)
