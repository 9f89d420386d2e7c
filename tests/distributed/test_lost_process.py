"""A process of `examine` or `plan` that is killed: the others end with a sentence that names it; the run resumes."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from headwise.distributed import LostRankError
from headwise.distributed.collectives import Ranks
from headwise.distributed.dealing import dealt
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
"""Seconds within which the others must have ended: gloo notices a closed connection at once."""


def start(command: list[str], size: int) -> list[subprocess.Popen[str]]:
    """`headwise command` on several processes, as two machines would start it: nobody kills the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "headwise", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank)},
        )
        for rank in range(size)
    ]


COMMANDS = {
    "examine": ["examine", "minilm", "--length", "48", "--texts", "12", "--spectra-every", "0", "--no-ablations"],
    "shared text": ["examine", "minilm", "--length", "256", "--texts", "4", "--sequence-parallel"],
    "plan": ["plan", "minilm", "--length", "32", "--texts", "4", "--objective", "multiply-adds"],
}


def result(out: Path) -> dict[str, Any]:
    """What was found; without the command, and times, of which a plan for multiply-adds has those of its receipt."""
    (path,) = (path for path in out.glob("*.json") if path.name in ("report.json", "plan.json"))
    found = json.loads(path.read_text())
    for name in ("timing", "exact_below"):
        found.pop(name, None)
    del found["provenance"]["command"]
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, number of processes) -> the result of a run that nobody stops."""

    @functools.cache
    def run(name: str, size: int) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("whole") / "out"
        ended = [x.communicate(timeout=240)[1] for x in start([*COMMANDS[name], "-o", str(out), "--quiet"], size)]
        assert out.exists(), ended
        return result(out)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(7))
@pytest.mark.parametrize("name", COMMANDS)
def test_the_others_end_with_a_sentence_and_the_run_resumes(
    name: str, attempt: int, tmp_path: Path, uninterrupted: Any
) -> None:
    draw = random.Random(f"{name} {attempt}")
    size, out = 2 + attempt % 2, tmp_path / "out"
    expected = uninterrupted(name, size)
    started = start([*COMMANDS[name], "-o", str(out), "--quiet"], size)
    victim = draw.randrange(size)
    while not out.exists() and all(process.poll() is None for process in started):
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 8))
    started[victim].send_signal(signal.SIGKILL)
    written = [process.communicate(timeout=LIMIT)[1] for process in started]
    codes = {rank: process.returncode for rank, process in enumerate(started) if rank != victim}
    assert set(codes.values()) <= {0, 2}, (codes, written)
    assert all(text.count("\n") <= 1 for text in written), written  # no traceback, not of C++ either
    if started[victim].returncode == 0:
        assert set(codes.values()) == {0}, (codes, written)
    if any(codes.values()):  # otherwise they no longer needed it
        assert any(f"rank {victim} (process {started[victim].pid}) has ended" in text for text in written), written
    if not list(out.glob("*.json")):  # otherwise it had written all
        again = start([*COMMANDS[name], "-o", str(out), "--quiet", "--resume" if out.exists() else "--force"], size)
        ended = [(process.communicate(timeout=240)[1], process.returncode) for process in again]
        assert [code for _, code in ended] == [0] * size, ended
    assert result(out) == expected


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def lose_one() -> tuple[str, list[int]]:
    """Work dealt out to two ranks, of which the second ends at its second piece; the sentence of the first."""
    done: list[int] = []
    pids = [pid for _, pid in Ranks.of(None).introduced().processes]

    def compute(key: int) -> int:
        if dist.get_rank() == 1 and key > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while key > 1 and is_running(pids[1]):
            time.sleep(0.01)
        done.append(key)
        return key

    try:
        dealt(range(100), compute)
    except LostRankError as error:
        return str(error), done
    raise AssertionError("no rank was lost")


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process runs is read from /proc")
def test_a_lost_process_is_noticed_before_the_work_is_done() -> None:
    pool = Pool(2)
    try:
        pool.start(lose_one)
        (good, found), _ = pool.results(timeout=60)
        assert good, found
        sentence, done = found
        assert f"rank 0 of 2: rank 1 (process {pool.processes[1].pid}) has ended" in sentence
        assert done in ([], [0], [0, 2])  # of 50
    finally:
        pool.close()


def test_a_command_joins_after_what_would_keep_its_threads() -> None:
    """Processes that import torch._dynamo after they have joined abort at their end, one in ten or so."""
    program = """
import sys, torch.distributed as dist
from headwise.cli.options import join_processes
def join(backend, **options): sys.exit("torch._dynamo" in sys.modules and 7)
dist.init_process_group = join
join_processes()"""
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **launched})
    assert found.returncode == 7
