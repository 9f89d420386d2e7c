"""Every test starts from the same place: seeded, on one thread, with uninitialised memory full of NaN."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# no test depends on a compiler, except those that ask for the `kernels` fixture
os.environ.setdefault("HEADWISE_KERNELS", "off")

# one thread: the suite runs in parallel processes, and a reduction's order then never changes
torch.set_num_threads(1)

# `torch.empty` hands out NaN, so a result that was never written cannot pass for a small number
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


class TorchRandom:
    """torch's generator in the shape hypothesis asks for, so that a shrunk example replays with the same numbers."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = TorchRandom()  # hypothesis keeps a weak reference
hypothesis.register_random(_torch_random)

# The same examples everywhere; `pytest --hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=30, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("default")


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def kernel_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HEADWISE_CACHE for all processes and runs of the suite: the library is built when its sources have changed."""
    kept = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    return tmp_path_factory.mktemp("kernels") if kept is None else Path(kept.mkdir("headwise-kernels"))


@pytest.fixture
def kernels(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test with the compiled kernels; without a compiler it is skipped."""
    from headwise.operators._kernels import native
    from headwise.operators._kernels.native.kernel_build import cannot_build

    if (reason := cannot_build()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("HEADWISE_CACHE", str(kernel_cache))
    with native.switched("build"):
        assert native.LIBRARY.ready(), native.LIBRARY.reason
        yield
