"""Commands on several processes, as torchrun starts them: the result once, and an error once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMINE = ["examine", "python:tests.cli.test_several_processes:model", "--spectra-every", "0"]
LIMIT = 180.0


def model():  # a factory
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    ids = [torch.randint(1, 50, (1, 24), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    return BertModel(BertConfig(vocab_size=50, **sizes)).eval(), [{"input_ids": x} for x in ids]


def torchrun(command: list[str]) -> subprocess.Popen[str]:
    """Two processes, whose output is that of one command."""
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *run, "--rdzv-endpoint", "localhost:0", "-m", "headwise", *command],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ended(command: list[str]) -> tuple[int, str, list[str]]:
    """Exit code, what is printed, and the sentences of headwise among the complaints."""
    running = torchrun(command)
    printed, complaints = running.communicate(timeout=LIMIT)
    return running.returncode, printed, sentences(complaints)


def sentences(complaints: str) -> list[str]:
    assert "headwise/src" not in complaints.partition("torch.distributed.elastic")[0]  # no traceback of ours
    return [line for line in complaints.splitlines() if line.startswith("headwise examine:")]


def test_one_result_and_one_page(tmp_path: Path) -> None:
    out = tmp_path / "report"
    code, printed, said = ended([*EXAMINE, "-o", str(out), "--json"])
    assert (code, said) == (0, [])
    assert json.loads(printed)["inputs"]["texts"] == 4
    assert list(out.glob("*.html"))


@pytest.mark.slow
def test_an_existing_directory_is_said_once(tmp_path: Path) -> None:
    out = tmp_path / "report"
    out.mkdir()
    (out / "report.json").touch()
    code, printed, said = ended([*EXAMINE, "-o", str(out)])
    assert (code, len(said), printed) == (1, 1, ""), said
    assert str(out) in said[0]


def test_a_wrong_line_is_said_once() -> None:
    code, printed, said = ended(["examine", "nowhere/at/all", "--texts", "0"])
    assert (code, len(said), printed) == (1, 1, ""), said
    assert "--texts is 0" in said[0]


@pytest.mark.slow
def test_a_missing_model_is_said_once(tmp_path: Path) -> None:
    code, _, said = ended(["examine", str(tmp_path / "nothing"), "-o", str(tmp_path / "out")])
    assert (code, len(said)) == (1, 1), said
    assert not list((tmp_path / "out").glob("*.html"))


@pytest.mark.slow
def test_ctrl_c_is_said_once(tmp_path: Path) -> None:
    out = tmp_path / "report"
    running = torchrun([*EXAMINE, "-o", str(out), "--quiet"])
    while not out.exists() and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    said = sentences(running.communicate(timeout=LIMIT)[1])
    assert len(said) <= 1, said  # none if the processes had finished
    assert running.returncode != 0
    code, _, said = ended([*EXAMINE, "-o", str(out), "--resume" if out.exists() else "--force"])
    assert (code, said) == (0, [])
