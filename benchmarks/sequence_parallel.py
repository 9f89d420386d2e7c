"""One sequence on 1, 2 and 4 processes: seconds, peak memory and bytes of every exchange, and a model of its cost.

    python -m benchmarks.sequence_parallel [--quick] [--json FILE]

Measured: forward and backward of attention with 4 heads of width 64 in float32, one thread a process, gloo.
    seconds   median of the wall-clock times, the slowest rank of each; ratio to one process
    busy      median of the processor times, the busiest rank of each: what falls with more cores than this machine has
    memory    peak resident memory of a rank above what it held before the step, its slices of q, k and v
    bytes     received by a rank in one forward pass, counted at the collectives; `formula` is what `traffic` says

This machine's cores bound what can be seen: with more processes than cores, time does not fall, memory and bytes do.

The model: seconds(P, N) = multiply-adds(N) / P * seconds for one + bytes / bandwidth + messages * latency.
Seconds for a multiply-add are those measured for each operator on one process.  `model` is what the first two terms
say, with the bandwidth measured here, over the measured processor time: below 1 the model is too optimistic.  The
projection to other clusters has a stated bandwidth and latency, and a core like this machine's for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the process group, whose threads it would keep beyond its end
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from headwise.distributed import CountedTraffic, Slices, sequence_parallel, traffic
from headwise.distributed.traffic import head_traffic
from headwise.operators import efficient, fixed, near_far, nystrom, projected, softmax, uniform, window
from headwise.operators.base import AttentionOperator
from headwise.operators.linear.projections import dense

HEADS, WIDTH = 4, 64
LATENCY, BANDWIDTH = 20e-6, 25e9
"""Of the projection: seconds for one message, and bytes a second into one rank (a 200 Gbit/s link)."""


def _near_far(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
    r = torch.linspace(-1, 1, 8 * WIDTH, dtype=q.dtype).reshape(8, WIDTH)
    return near_far(q, k, r, r, torch.zeros(8, dtype=q.dtype), block=64, **masks)


def _projected(q: Tensor, k: Tensor) -> AttentionOperator:
    n = k.shape[-2]
    if n > 10**5:  # the model asks for the sizes of long sequences, not for values
        return projected(q, k, dense(torch.empty(128, n, dtype=q.dtype, device="meta")))
    return projected(q, k, dense(torch.arange(128 * n).remainder(7).reshape(128, n).to(q.dtype) / n))


def _fixed(q: Tensor, k: Tensor, **masks: Any) -> AttentionOperator:
    return fixed(q, k, 1 << round(math.log2(k.shape[-2]) / 2), **masks)


Case = tuple[Callable[..., AttentionOperator], dict[str, Any], dict[str, Any], int]
CASES: dict[str, Case] = {  # builder, masks, options of sequence_parallel, length
    "softmax, ring, zig-zag": (softmax, {"causal": True}, {"exchange": "ring", "zigzag": True}, 1024),
    "softmax, ring": (softmax, {}, {"exchange": "ring"}, 1024),
    "softmax, heads": (softmax, {}, {"exchange": "heads"}, 1024),
    "window 129": (partial(window, width=129), {"causal": True}, {}, 8192),
    "fixed": (_fixed, {"causal": True}, {}, 8192),
    "near_far 64": (_near_far, {"causal": True}, {}, 8192),
    "efficient": (efficient, {}, {}, 8192),
    "efficient, causal": (efficient, {"causal": True}, {}, 8192),
    "projected 128": (_projected, {}, {}, 8192),
    "nystrom 64": (partial(nystrom, landmarks=64), {}, {}, 8192),
    "uniform": (lambda q, k: uniform(q.shape[-2], k.shape[-2]), {}, {}, 8192),
}


def peak() -> int:
    """The largest resident memory of this process since `forget_peak`, in bytes; 0 where Linux does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(rank: int, size: int, meeting: str, out: str, repeats: int, shrink: int) -> None:
    """Every case on this rank; without `repeats` the memory, which needs an allocator that slows everything down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    found: dict[str, Any] = {"link": _link()}
    for name, (build, masks, options, n) in CASES.items():
        n //= shrink
        held = Slices.even(n, size, zigzag=options.get("zigzag", False))
        torch.manual_seed(rank)
        m = held.lengths[rank]
        q, k, v = (torch.randn(1, HEADS, m, WIDTH, requires_grad=True) for _ in range(3))
        sharded = sequence_parallel(build, **options)

        def step(sharded=sharded, q=q, k=k, v=v, masks=masks) -> None:
            sharded(q, k, **masks)(v).sum().backward()
            q.grad = k.grad = v.grad = None

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
            slowest = torch.tensor([time.perf_counter() - start, time.process_time() - used]).double()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times.append(slowest.tolist())
        seconds, busy = zip(*times, strict=True)
        with CountedTraffic() as count, torch.no_grad():
            sharded(q, k, **masks)(v)
        most = torch.tensor([memory, count.bytes(torch.float32)]).double()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        memory, received = most.tolist()
        found[name] = {"n": n, "seconds": statistics.median(seconds), "spread": max(seconds) - min(seconds)}
        found[name] |= {"busy": statistics.median(busy), "memory": memory, "received": received}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()  # no connection is closed while another rank still reads from it
    dist.destroy_process_group()


def _link() -> dict[str, float]:
    """Seconds for the smallest message, and bytes a second into one rank."""
    size = dist.get_world_size()

    def timed(x: Tensor, count: int) -> float:
        out = torch.empty_like(x)
        times = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(out, x)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    small, large = timed(torch.zeros(size), 50), timed(torch.zeros(size << 18), 9)
    return {"latency": small, "bandwidth": ((size - 1) << 20) / max(large - small, 1e-9)}


def whole(name: str, n: int) -> AttentionOperator:
    """The operator of a whole sequence, without values."""
    build, masks, _, _ = CASES[name]
    q = torch.empty(HEADS, n, WIDTH, device="meta")
    return build(q, q, **masks)


def formula(name: str, n: int, ranks: int) -> float:
    """Bytes received by one rank in a forward pass."""
    _, _, options, _ = CASES[name]
    count = head_traffic if options.get("exchange") == "heads" else traffic
    return float(4 * HEADS * count(whole(name, n), WIDTH, ranks).received(ranks))


def work(name: str, n: int) -> float:
    """Multiply-adds of a forward pass; a causal softmax does half of what is counted."""
    cost = whole(name, n).cost(WIDTH).multiply_adds
    return cost / 2 if name == "softmax, ring, zig-zag" else cost


def messages(name: str, ranks: int) -> int:
    """One after another in a forward pass."""
    return ranks - 1 if "ring" in name else 3 * max(1, math.ceil(math.log2(ranks)))


def processor_seconds(name: str, n: int, ranks: int, rate: float, bandwidth: float) -> float:
    """Of one rank, forward and backward: its share of the multiply-adds, and three times the bytes of a forward."""
    received = 3 * formula(name, n, ranks) if ranks > 1 else 0.0
    return work(name, n) * rate / ranks + received / bandwidth


def predicted(name: str, n: int, ranks: int, rate: float) -> float:
    """Seconds with the stated bandwidth and latency, and a core for each rank."""
    return processor_seconds(name, n, ranks, rate, BANDWIDTH) + 3 * messages(name, ranks) * LATENCY


def run(repeats: int, shrink: int) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for size in (1, 2, 4):
        found[size] = _spawned(size, repeats, shrink)
        # blocks of 64 kB and more go back to the system at once, so that a peak is what one step needs
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
        memory = _spawned(size, 0, shrink)
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        for name in CASES:
            found[size][name]["memory"] = memory[name]["memory"]
        print(f"measured {size} process{'es' if size > 1 else ''}", flush=True)
    return found


def _spawned(size: int, repeats: int, shrink: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        spawn(measure, (size, f"{folder}/meeting", out, repeats, shrink), nprocs=size)
        return json.loads(Path(out).read_text())


def show(found: dict[int, dict[str, Any]], repeats: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"\n{HEADS} heads of width {WIDTH}, float32, forward and backward, median of {repeats}; {cores} cores\n")
    columns = ("n", 7), ("P", 3), ("seconds", 9), ("spread", 8), ("ratio", 6), ("busy", 9), ("ratio", 6), ("model", 6)
    columns += ("MB peak", 9), ("ratio", 6), ("kB received", 13), ("formula", 9)
    print(f"{'':24}" + "".join(f"{name:>{width}}" for name, width in columns))
    for name in CASES:
        one = found[1][name]
        rate = one["busy"] / work(name, one["n"])
        for size, results in found.items():
            x = results[name]
            model = processor_seconds(name, x["n"], size, rate, results["link"]["bandwidth"]) / x["busy"]
            said = formula(name, x["n"], size) if size > 1 else 0.0
            ratios = [x[key] / max(1e-9, one[key]) for key in ("seconds", "busy", "memory")]
            print(
                f"{name:24}{x['n']:7}{size:3}{x['seconds']:9.4f}{x['spread']:8.4f}{ratios[0]:6.2f}{model:6.2f}", end=""
            )
            print(f"{x['busy']:9.4f}{ratios[1]:6.2f}{x['memory'] / 1e6:9.1f}{ratios[2]:6.2f}", end="")
            print(f"{x['received'] / 1e3:13.1f}{said / 1e3:9.1f}")
    for size, results in list(found.items())[1:]:
        link = results["link"]
        print(
            f"\nhere, {size} processes: {link['latency'] * 1e6:.0f} us a message, {link['bandwidth'] / 1e9:.2f} GB/s",
            end="",
        )
    print(f"\n\nProjected: {BANDWIDTH / 1e9:.0f} GB/s and {LATENCY * 1e6:.0f} us a message, one core of this machine")
    print("seconds of forward and backward, and the share of them that is communication\n")
    sizes = [(n, ranks) for n in (10**6, 10**7) for ranks in (8, 64, 1024)]
    print(f"{'':24}" + "".join(f"{f'{n // 10**6}M, {ranks}':>18}" for n, ranks in sizes))
    for name in CASES:
        one = found[1][name]
        rate = one["busy"] / work(name, one["n"])
        cells = []
        for n, ranks in sizes:
            if "heads" in name and HEADS % ranks:
                cells.append("too few heads")
                continue
            total = predicted(name, n, ranks, rate)
            share = 1 - work(name, n) * rate / ranks / total
            cells.append(f"{total:.3g} s {share:4.0%}")
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the length, two runs")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    arguments = parser.parse_args()
    repeats, shrink = (2, 8) if arguments.quick else (5, 1)
    found = run(repeats, shrink)
    show(found, repeats)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
