"""Independent pieces of work, one to a thread.

A small tensor does not feed two threads, two of them do: torch's operations release Python's lock, and a thread that
splits nothing waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def side_by_side(work: Callable[[int], T], count: int) -> list[T]:
    """[work(0), ..., work(count - 1)], as many at a time as torch has threads."""
    threads = torch.get_num_threads()
    if threads == 1 or count == 1:
        return [work(i) for i in range(count)]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(count)))
    finally:
        torch.set_num_threads(threads)
