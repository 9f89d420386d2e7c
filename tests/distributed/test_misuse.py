"""Ranks that disagree, or lose one another, end with a sentence on every rank, never in a hang."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from headwise.distributed import Slices, sequence_parallel
from headwise.distributed.collectives import Ranks
from headwise.errors import InputError, ShapeError
from headwise.operators import efficient, hashed, nystrom, product, softmax, window
from tests.distributed.pool import Failed, Pool


def call(what: str) -> None:
    rank = dist.get_rank()
    q, v = torch.randn(2, 4, 6, 4), torch.randn(2, 4, 6, 5)
    first = rank == 0
    if what == "builders":
        sequence_parallel(softmax if first else efficient)(q, q)(v)
    elif what == "options":
        sequence_parallel(partial(window, width=3 if first else 5))(q, q)(v)
    elif what == "hidden options":
        width = 3 if first else 5
        sequence_parallel(lambda q, k: window(q, k, width))(q, q)(v)
    elif what == "dtypes":
        q, v = (x if first else x.double() for x in (q, v))
        sequence_parallel(softmax)(q, q)(v)
    elif what == "widths":
        sequence_parallel(softmax)(q, q)(v if first else v[..., :3])
    elif what == "gradients":
        sequence_parallel(softmax)(q, q)(v.requires_grad_(first))
    elif what == "one rank's rows":
        sequence_parallel(softmax)(q, q)(v if first else v[..., :3, :])
    elif what == "masks":
        sequence_parallel(softmax)(q, q, **({"key_mask": torch.ones(2, 1, 6, dtype=torch.bool)} if first else {}))(v)
    elif what == "pairs":
        sequence_parallel(softmax)(q, q, pair_mask=torch.ones(6, 6, dtype=torch.bool))(v)
    elif what == "causal":
        sequence_parallel(nystrom)(q, q, causal=True)(v)
    elif what == "rotations":
        sequence_parallel(hashed)(q, q)(v)
    elif what == "rotations of a factor":
        sequence_parallel(lambda q, k: product(softmax(q, k), hashed(q, k)))(q, q)(v)
    elif what == "heads":
        sequence_parallel(softmax, exchange="heads")(q[:, :1], q[:, :1])(v[:, :1])
    elif what == "ring":
        sequence_parallel(efficient, exchange="ring")(q, q)(v)
    elif what == "empty batch":
        sequence_parallel(softmax)(q[:0], q[:0])(v[:0])
    elif what == "nothing":
        sequence_parallel(softmax)(q[..., :0, :], q[..., :0, :])(v[..., :0, :])
    elif what == "dense":
        sequence_parallel(softmax)(q, q).dense()


MESSAGES = {
    "builders": (r"rank 0 has softmax .* rank 1 has efficient", r"rank 1 has efficient .* rank 0 has softmax"),
    "options": (r"width=3.*width=5", r"width=5.*width=3"),
    "hidden options": (r"width=3.*width=5", r"width=5.*width=3"),
    "dtypes": (r"float32.*float64", r"float64.*float32"),
    "widths": (r"\(2, 4, n, 5\).*\(2, 4, n, 3\)", r"\(2, 4, n, 3\).*\(2, 4, n, 5\)"),
    "gradients": (r"with gradient", r"with gradient"),
    "one rank's rows": (r"rank 1 has an error: .*axis 'n' must agree", r"axis 'n' must agree, but k has 6, v has 3"),
    "masks": (r"key_mask=\(2, 1\).*key_mask=None", r"key_mask=None.*key_mask=\(2, 1\)"),
    "pairs": (r"does not support pair_mask",) * 2,
    "causal": (r"nystrom: does not support causal",) * 2,
    "rotations": (r"pass the same `rotations`",) * 2,
    "rotations of a factor": (r"pass the same `rotations`",) * 2,
    "heads": (r"1 heads for 2 ranks",) * 2,
    "ring": (r"no ring for Efficient",) * 2,
    "empty batch": (r"q must be \(\*batch, rows, width\), but has shape \(0, 4, 6, 4\)",) * 2,
    "nothing": (r"0 queries and 0 keys on all ranks",) * 2,
    "dense": (r"entries of P are spread",) * 2,
}


@pytest.mark.parametrize("what", MESSAGES)
def test_every_rank_says_what_is_wrong(two: Pool, what: str) -> None:
    with pytest.raises(Failed) as failed:
        two.run(call, what)
    for error, expected in zip(failed.value.errors, MESSAGES[what], strict=True):
        assert error is not None
        name, message, _ = error
        assert name in ("InputError", "ShapeError", "DtypeError", "UnsupportedError"), error
        assert "\n" not in message
        assert re.search(expected, message), message


@pytest.mark.parametrize(
    "backends, device",
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("xpu:xccl", "xpu")],
)
def test_numbers_are_sent_from_where_the_backend_reads(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert Ranks(0, 2).device == torch.device(device)


def test_torch_distributed_must_be_initialised() -> None:
    with pytest.raises(InputError, match="start the program with torchrun"):
        sequence_parallel(softmax)


def in_a_group() -> float:
    """Attention in a group of two of the ranks, and after the group has gone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[dist.get_rank() // 2]
    torch.manual_seed(0)
    q = torch.randn(2, 6, 4)
    held = Slices.even(6, 2)
    part = held.cut(q, dist.get_rank(own))
    build = sequence_parallel(softmax, own)
    difference = (build(part, part)(part) - held.cut(softmax(q, q)(q), dist.get_rank(own))).abs().amax()
    dist.destroy_process_group(own)
    del own, groups
    with pytest.raises(InputError, match="was destroyed"):
        build(part, part)(part)
    return difference.item()


def test_a_group_of_some_ranks(four: Pool) -> None:
    assert max(four.run(in_a_group)) < 1e-6


def test_slices_are_checked() -> None:
    with pytest.raises(ShapeError, match="one length for each rank"):
        Slices(())
    with pytest.raises(ShapeError, match="at least 0"):
        Slices((3, -1))


def meet() -> None:
    Ranks.of(None).introduced()


def forever() -> None:
    """Attention forward and backward until something fails; what failed, and after how many seconds of silence."""
    from headwise.distributed import LostRankError

    q = torch.randn(1, 4, 64, 8, requires_grad=True)
    builds = [sequence_parallel(build) for build in (softmax, partial(window, width=9), efficient)]
    try:
        while True:
            for build in builds:
                build(q, q, causal=True)(q).sum().backward()
    except LostRankError:
        raise
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_a_killed_rank_ends_the_others(attempt: int) -> None:
    moments = random.Random(attempt)
    pool = Pool(3, timeout=20)
    try:
        pool.run(meet)
        pool.start(forever)
        time.sleep(moments.uniform(0.05, 1.5))
        victim = moments.randrange(3)
        process = pool.processes[victim]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        start = time.monotonic()
        found = pool.results(timeout=60)
        assert time.monotonic() - start < 50
        errors = [error for rank, (good, error) in enumerate(found) if rank != victim and not good]
        assert [name for name, *_ in errors] == ["LostRankError"] * 2, errors
        messages = [message for _, message, _ in errors]
        assert any(f"rank {victim} (process {process.pid}) has ended" in message for message in messages), messages
        assert not any("\n" in message for message in messages)
    finally:
        pool.close()
