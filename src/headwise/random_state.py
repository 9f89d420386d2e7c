"""The global random state belongs to the caller: what we draw comes from generators, or inside these contexts."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """The global random states of torch (every device in use), Python and numpy are afterwards as they were before."""
    state, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if mps is not None:
            torch.mps.set_rng_state(mps)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Layers made inside draw their weights from `seed`, as torch draws them: from the global random state.

    >>> with seeded(0):
    ...     one = torch.nn.Linear(2, 2)
    >>> with seeded(0):
    ...     other = torch.nn.Linear(2, 2)
    >>> torch.equal(one.weight, other.weight)
    True
    """
    with kept_random_state():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # torch.manual_seed would also seed devices that are not in use yet
            torch.cuda.manual_seed_all(seed)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(seed)
        yield
