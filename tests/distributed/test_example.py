"""The example runs under torchrun, and prints that several processes compute what one does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_the_example_runs_under_torchrun(processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    run = subprocess.run(
        [*command, "examples/long_context.py", "--tokens", "96"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = re.findall(rf"(\w+) +{processes} processes equal one to ([\d.e+-]+)", run.stdout)
    assert [name for name, _ in found] == ["multihead", "encoder", "grid", "rewritten_model"]
    assert all(float(difference) < 2e-6 for _, difference in found), found
