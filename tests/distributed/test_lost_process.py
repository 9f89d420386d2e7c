"""A process of `examine` or `plan` that is killed: the others end with a sentence that names it; the run resumes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(7))
@pytest.mark.parametrize("name", COMMANDS)
def test_the_others_end_with_a_sentence_and_the_run_resumes(name: str, attempt: int, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {attempt}")
    size, out = 2 + attempt % 2, tmp_path / "out"
    started = start([*COMMANDS[name], "-o", str(out), "--quiet"], size)
    victim = draw.randrange(size)
    while not out.exists() and all(process.poll() is None for process in started):
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 8))
    started[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    written = [process.communicate(timeout=LIMIT)[1] for process in started]
    assert time.monotonic() - killed < LIMIT
    others = [rank for rank in range(size) if rank != victim]
    if any(started[rank].returncode for rank in others):  # otherwise it came too late
        for rank in others:
            assert started[rank].returncode in (0, 2), written[rank]
            assert "Traceback" not in written[rank]
        named = f"rank {victim} (process {started[victim].pid}) has ended"  # once they have met
        assert any(named in text or "another rank has ended" in text for text in written), written
    again = start([*COMMANDS[name], "-o", str(out), "--quiet", "--resume" if out.exists() else "--force"], size)
    ended = [(process.communicate(timeout=240)[1], process.returncode) for process in again]
    assert [code for _, code in ended] == [0] * size, ended
