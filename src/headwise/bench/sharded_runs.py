"""Steps on 1, 2 and 4 processes of this machine: seconds, memory, and the bytes that every rank receives.

seconds   median of the wall-clock times of forward and backward, of the slowest rank
busy      mean of the processor times, of the busiest rank: what falls with more cores than a machine has
memory    peak resident memory of a rank above what it held before the step, its slices
received  bytes by a rank in one forward pass, counted at the collectives
calls     of each collective in forward and backward, and `bytes` that a rank receives by them
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the process group, whose threads it would keep beyond its end
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from headwise.bench.sharded_cases import HEADS, WIDTH, ShardedCase
from headwise.distributed import CountedTraffic
from headwise.distributed.collectives import Ranks, exchange, gathered, summed
from headwise.distributed.traffic import COLLECTIVES

MakeCases = Callable[[], Mapping[str, ShardedCase]]
"""A function of a module, which other processes can import."""

PARTS = (1, 2, 4)
"""One process also takes these parts of the length, for what a step of it costs at the lengths of slices."""

SHORT = 256
"""Tokens of a sequence that shows what several processes do besides computing and sending."""


def run_sharded(
    make: MakeCases, size: int, *, repeats: int = 5, shrink: int = 1, names: list[str] | None = None
) -> dict[str, Any]:
    """{"link": …, name: {"n", "seconds", "busy", "received", …}} of `size` processes, one thread each.

    shrink   the part of each case's length
    """
    return _spawned(make, size, repeats, shrink, names)


def run_memory(make: MakeCases, size: int, *, shrink: int = 1) -> dict[str, int]:
    """Peak bytes of the rank that needs most: blocks of 64 kB and more go back to the system at once, which is slow."""
    with _environment("MALLOC_MMAP_THRESHOLD_", str(1 << 16)):
        found = _spawned(make, size, 0, shrink, None)
    return {name: x["memory"] for name, x in found.items() if name != "link"}


def _spawned(make: MakeCases, size: int, repeats: int, shrink: int, names: list[str] | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        spawn(_serve, (make, size, f"{folder}/meeting", out, repeats, shrink, names), nprocs=size)
        return json.loads(Path(out).read_text())


def _serve(
    rank: int, make: MakeCases, size: int, meeting: str, out: str, repeats: int, shrink: int, names: list[str] | None
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    found: dict[str, Any] = {"link": _link() if repeats else {}}
    for name, case in make().items():
        if names is None or name in names:
            found[name] = _measure(case, case.n // shrink, rank, size, repeats)
            if size == 1 and repeats:
                lengths = [case.n // shrink // part for part in PARTS]
                found[name]["alone"] = [[n, _measure(case, n, rank, size, repeats)["busy"]] for n in lengths]
            if size > 1 and repeats:
                found[name]["short"] = _measure(case, min(SHORT, case.n // shrink), rank, size, repeats)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()  # no connection is closed while another rank still reads from it
    dist.destroy_process_group()


def _measure(case: ShardedCase, n: int, rank: int, size: int, repeats: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    forward, leaves = case.prepare(case.slices(n, size), rank)

    def step() -> None:
        forward().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    step()
    forget_peak()
    before = peak()
    step()
    memory = peak() - before
    times = []
    for _ in range(max(1, repeats)):
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - start, time.process_time() - used))
    seconds, busy = zip(*times, strict=True)
    with CountedTraffic() as count, torch.no_grad():
        forward()
    with CountedTraffic() as both:
        step()
    sent = [sum(size for (name, _), size in both.received.items() if name == kind) for kind in KINDS]
    own = [statistics.median(seconds), max(seconds) - min(seconds), statistics.fmean(busy), memory]
    most = torch.tensor([*own, count.bytes(torch.float32), *sent]).double()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    names = ("seconds", "spread", "busy", "memory", "received")
    found = dict(zip((*names, *KINDS), most.tolist(), strict=True))
    bytes_ = {kind: found.pop(kind) for kind in KINDS}
    return {"n": n, **found, "calls": {kind: both.calls[kind] for kind in KINDS}, "bytes": bytes_}


KINDS = tuple(COLLECTIVES.values())

CALLS, LARGE_CALLS = 100, 10
"""Calls whose mean is taken, of small and large tensors: now and then one takes twenty times as long as the others."""


def _link() -> dict[str, Any]:
    """Processor time of the busiest rank, by kind of collective: `latency`, seconds of one of 16 kB for each rank, and
    `bandwidth`, bytes received a second by one of 4 MB for each; `copy`, bytes a second of packing rows.

    As between the computations of a step: each follows a pass through memory that the caches do not hold.
    """
    ranks = Ranks.of(None)
    ones = [1] * ranks.size
    collectives: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_to_all": lambda x: exchange(x, ones, ones, ranks),
        "all_gather": lambda x: gathered(x[0], ranks),
        "all_reduce": lambda x: summed(x[0], ranks),
    }
    others = torch.ones(1 << 21)

    def busy(call: Callable[[], object], calls: int = CALLS) -> float:
        dist.barrier()
        start = time.process_time()
        for _ in range(calls):
            others.mul_(1)
            call()
        found = torch.tensor((time.process_time() - start) / calls).double()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()

    nothing, rows = busy(lambda: None), torch.zeros(HEADS, 1 << 12, WIDTH)
    small, large = (torch.zeros(ranks.size, 1 << scalars) for scalars in (12, 20))
    found: dict[str, Any] = {"latency": {}, "bandwidth": {}}
    found["copy"] = 4 * rows.numel() / max(1e-9, busy(lambda: rows.transpose(0, 1).contiguous()) - nothing)
    for kind, call in collectives.items():
        with CountedTraffic() as count:
            call(large)
        taken = found["latency"][kind] = max(0.0, busy(partial(call, small)) - nothing)
        found["bandwidth"][kind] = max(1, count.bytes()) / max(
            1e-9, busy(partial(call, large), LARGE_CALLS) - nothing - taken
        )
    return found


def peak() -> int:
    """The largest resident memory of this process since `forget_peak`, in bytes; 0 where Linux does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
