"""The command line: what it prints, and the exit code that answers."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import headwise
from headwise.cli import main as cli
from headwise.errors import ShapeError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command called `probe`, whose `run` each test supplies."""
    module = types.ModuleType("headwise_probe")
    monkeypatch.setitem(sys.modules, "headwise_probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("headwise_probe", "answers as the test likes"))
    return module


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(argv)
    out = capsys.readouterr().out
    for name, (_, about) in cli.COMMANDS.items():
        assert name in out
        assert about in out


def test_an_unknown_command_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tuor"])
    said = capsys.readouterr().err
    assert "'tuor' (choose from" in said
    assert all(repr(name) in said for name in cli.COMMANDS)


def test_a_command_gets_the_rest_of_the_line_and_its_answer_is_the_exit_code(command: types.ModuleType) -> None:
    seen: list[list[str]] = []
    command.run = lambda argv: (seen.append(argv), 7)[1]  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe", "--help", "--version", "x"]) == 7
    assert seen == [["--help", "--version", "x"]]


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ShapeError("Softmax: axis 'k' must agree, but q has 3, k has 4"), 2, "probe: Softmax: axis 'k' must agree"),
        (KeyboardInterrupt(), 130, "probe: interrupted"),
    ],
)
def test_errors_become_one_sentence_and_a_code(
    command: types.ModuleType, error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    command.run = run  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"headwise {said}")
    assert captured.err.count("\n") == 1


def test_other_errors_are_bugs_and_keep_their_traceback(command: types.ModuleType) -> None:
    def run(argv: list[str]) -> int:
        raise ValueError("ours to fix")

    command.run = run  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="ours to fix"):
        cli.main(["probe"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys, types; from headwise.cli import main as cli\n"
        "probe = types.ModuleType('probe')\n"
        "def run(argv):\n"
        "    for i in range(100_000): print(i)\n"
        "    return 0\n"
        "probe.run = run; sys.modules['probe'] = probe; cli.COMMANDS['probe'] = ('probe', '')\n"
        "sys.exit(cli.main(['probe']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141
