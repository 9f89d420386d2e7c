"""Bytes received are those of the formulas: as torch.distributed is asked for them, and as sockets count them."""

from __future__ import annotations

import sys

import pytest
import torch

from headwise.distributed import Traffic, traffic
from headwise.operators import softmax, window
from tests.distributed.pool import Pool
from tests.distributed.sharded import SUBJECTS, counted

HEADERS = 800
"""Bytes at most that gloo adds to one collective and peer: headers, and notifications that a buffer is ready."""

NCCL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
"""Types that collectives on GPUs take; of the collectives themselves, those that are not counted are refused."""


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_received_are_those_of_the_formula(size: int, request: pytest.FixtureRequest) -> None:
    pool: Pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    for name, subject in SUBJECTS.items():
        if name == "of other keys":  # a builder that changes q and k is not described by its operator
            continue
        for causal in (False, True) if subject.causal else (False,):
            found = pool.run(counted, name, 96, causal, 32, 4)
            most = max(rank["counted"] for rank in found)
            assert most == found[0]["formula"], f"{name}, causal={causal}: {most} bytes, not {found[0]['formula']}"
            assert set().union(*(rank["dtypes"] for rank in found)) <= NCCL, name
            if sys.platform == "linux":
                for rank in found:
                    extra = rank["sockets"] - rank["all"]
                    assert 0 < extra <= HEADERS * rank["calls"] * (size - 1), f"{name}: {extra} bytes beyond {rank}"


OF_ONE_HEAD = [name for name in SUBJECTS if name.startswith(("strided", "hashed"))]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_heads_that_do_not_divide(size: int, heads: int, request: pytest.FixtureRequest) -> None:
    pool: Pool = request.getfixturevalue({2: "two", 4: "four"}[size])
    for name in OF_ONE_HEAD:
        for causal in (False, True):
            for n in (96, 50):
                found = pool.run(counted, name, n, causal, 32, heads)
                most = max(rank["counted"] for rank in found)
                if name != "strided_steps" or n == 96:  # its factors may have their maxima on different ranks
                    assert most == found[0]["formula"], f"{name}, {n}: {most} bytes, not {found[0]['formula']}"
                assert most <= found[0]["bound"], f"{name}, {n}: {most} bytes, more than {found[0]['bound']}"


def test_the_sizes_of_long_sequences() -> None:
    """A million tokens on eight ranks, d = 64, float32: megabytes for softmax, kilobytes for a window."""
    q = torch.empty(1 << 20, 64, device="meta")
    assert 4 * traffic(softmax(q, q), 64, 8).received(8) == 4 * 2 * 64 * (1 << 20) * 7 // 8  # 470 MB
    assert 4 * traffic(window(q, q, 129), 64, 8).received(8) == 4 * 2 * 64 * 128  # 66 kB


def test_an_all_reduce_receives_twice_its_share() -> None:
    assert (Traffic(10, 12) + Traffic(1)).received(4) == 11 + 2 * 12 * 3 // 4
