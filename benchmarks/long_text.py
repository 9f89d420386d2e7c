"""One long text examined by 1, 2 and 4 processes: peak memory of each, time, and whether the numbers agree.

    python -m benchmarks.long_text [--tokens 8192] [--processes 1 2 4] [--width 256] [--layers 4]

A Llama of random weights, streaming measures, one thread a process.  Memory is the peak of the process during the
examination: above what it held before (weights, libraries), and in all; "difference" is the largest relative one of
any measure of any head from that of one process.  Blocks of 64 kB and more go back to the system at once, so that a
peak is what the run needs.  On two cores four processes show memory and equality, not speed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo  # before the process group, whose threads it would keep beyond its end
import torch.distributed as dist

import headwise
from headwise.bench.sharded_runs import forget_peak, peak
from headwise.cli.tables import print_table


def worker(options: argparse.Namespace) -> None:
    """One process: examine, and print peak memory, seconds and all numbers as JSON."""
    from transformers import LlamaConfig, LlamaModel

    torch.set_num_threads(1)
    if options.size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    heads = 8
    config = LlamaConfig(
        vocab_size=1000, hidden_size=options.width, intermediate_size=4 * options.width, num_attention_heads=heads,
        num_key_value_heads=heads, num_hidden_layers=options.layers, max_position_embeddings=options.tokens,
    )  # fmt: skip
    model, ids = LlamaModel(config).eval(), torch.randint(1000, (1, options.tokens))
    shared: dict[str, Any] = {"spectra_every": 0, "sequence_parallel": options.size > 1}
    shared["excerpt"] = {"input_ids": ids[:, :256]}
    headwise.examine(model, [{"input_ids": ids[:, :256]}], **shared)  # loads what is loaded once
    forget_peak()
    before, start = peak(), time.perf_counter()
    found = headwise.examine(model, [{"input_ids": ids}], **shared)
    taken = time.perf_counter() - start
    whole = peak()
    numbers = [value.mean for record in found.records for value in record.measures.values()]
    print(
        json.dumps({"above": (whole - before) / 1e6, "all": whole / 1e6, "seconds": taken, "numbers": numbers}),
        flush=True,
    )
    if options.size > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(options: argparse.Namespace, size: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "width", "layers")]
    command = [sys.executable, "-m", "benchmarks.long_text", "--size", str(size), *sizes]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(size)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"a process of {size} failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.size:
        worker(options)
        return
    rows: list[list[str]] = []
    expected: list[float] = []
    alone: dict[str, float] = {}
    for size in options.processes:
        found = run(options, size)
        expected = expected or found[0]["numbers"]
        pairs = [(x, y) for part in found for x, y in zip(part["numbers"], expected, strict=True)]
        off = max(abs(x - y) / max(abs(y), 1e-3) for x, y in pairs if x == x or y == y)
        most = {what: max(part[what] for part in found) for what in ("above", "all", "seconds")}
        alone = alone or most
        memory = [
            cell for what in ("above", "all") for cell in (f"{most[what]:.0f}", f"{most[what] / alone[what]:.2f}")
        ]
        rows.append([f"{size}", *memory, f"{most['seconds']:.0f}", f"{off:.0e}"])
    title = f"one text of {options.tokens} tokens, Llama of {options.layers} layers of {options.width}"
    print_table(
        title, ["processes", "MB above the model", "of one", "MB in all", "of one", "seconds", "difference"], rows
    )


if __name__ == "__main__":
    main()
