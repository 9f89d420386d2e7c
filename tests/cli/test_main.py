"""The command line: what it prints, and the exit code that answers."""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import headwise
from headwise.cli import main as cli
from headwise.errors import InputError, ShapeError


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
    assert cli.main(["tuor"]) == 2
    said = capsys.readouterr().err
    assert "'tuor' (choose from" in said
    assert all(repr(name) in said for name in cli.COMMANDS)


def test_a_command_gets_the_rest_of_the_line_and_its_answer_is_the_exit_code(command: types.ModuleType) -> None:
    seen: list[list[str]] = []
    command.run = lambda argv: (seen.append(argv), 7)[1]  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe", "--help", "--version", "x"]) == 7
    assert seen == [["--help", "--version", "x"]]


def raises(error: BaseException):
    def run(argv: list[str]) -> int:
        raise error

    return run


BUG = "this is a bug in headwise: run again with --debug for the traceback, and report it"


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ShapeError("Softmax: axis 'k' must agree, but q has 3, k has 4"), 2, "Softmax: axis 'k' must agree"),
        (InputError("probe: keep must be above 0"), 2, "keep must be above 0\n"),
        (InputError("two\nlines and \x1b[31m red \udcff"), 2, "two lines and \\x1b[31m red \\udcff\n"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 2, "No space left on device (out/x)\n"),
        (PermissionError(errno.EACCES, "Permission denied", b"out/\xff"), 2, "Permission denied (out/\\udcff)\n"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "Too many open files\n"),
        (MemoryError(), 2, "not enough memory; use fewer or shorter inputs, or a smaller model (MemoryError)\n"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: x"), 2, "not enough memory; use"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GB"), 2, "not enough memory; use"),
        (RuntimeError("could not create a primitive"), 2, "not enough memory; use"),
        (RuntimeError("unable to open file <x>: Too many open files (24)"), 2, "RuntimeError: unable to open file <x>"),
        (RecursionError("maximum recursion depth exceeded"), 2, "the input is nested too deeply"),
        (UnicodeEncodeError("ascii", "\u2192", 0, 1, "no"), 2, "text that cannot be read or written"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("ours to fix\nmore"), 70, f"ValueError: ours to fix; {BUG}\n"),
        (AssertionError(), 70, f"AssertionError; {BUG}\n"),
        (GeneratorExit("a panic of an extension"), 70, f"GeneratorExit: a panic of an extension; {BUG}\n"),
    ],
)
def test_errors_become_one_sentence_and_a_code(
    command: types.ModuleType, error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raises(error)  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"headwise probe: {said}")
    assert captured.err.count("\n") == 1


def test_real_allocations_that_fail(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    for size in ((1 << 50,), (1 << 31, 1 << 31)):
        command.run = lambda argv, size=size: torch.empty(size)  # pyright: ignore[reportAttributeAccessIssue]
        assert cli.main(["probe"]) == 2
        assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cause, code, said",
    [
        (
            MemoryError(),
            2,
            "not enough memory; use fewer or shorter inputs, or a smaller model (RuntimeError: wrapped)",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory; use"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "RuntimeError: wrapped"),
        (KeyError("x"), 70, f"RuntimeError: wrapped; {BUG}"),
    ],
)
@pytest.mark.parametrize("explicit", [True, False])
def test_the_cause_of_an_error_counts(
    command: types.ModuleType,
    cause: Exception,
    code: int,
    said: str,
    explicit: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torch.export and others wrap what went wrong in exceptions of their own, once or twice."""

    def run(argv: list[str]) -> int:
        try:
            try:
                raise cause
            except Exception as error:
                raise LookupError("wrapped") from (error if explicit else None)
        except Exception as error:
            raise RuntimeError("wrapped") from (error if explicit else None)

    command.run = run  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err.startswith(f"headwise probe: {said}")


@pytest.mark.parametrize(
    "effect", [OSError(errno.EBADF, "Bad file descriptor"), InputError("cannot write x"), RuntimeError("half done")]
)
@pytest.mark.parametrize("handled", [True, False])
def test_what_fails_because_of_a_signal_is_an_interruption(
    command: types.ModuleType, effect: Exception, handled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code that is stopped halfway raises its own errors; some code swallows the exception of the signal first."""

    def run(argv: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except KeyboardInterrupt:
            if handled:
                raise effect from None
        raise effect

    command.run = run  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe"]) == 143
    assert capsys.readouterr().err == "headwise probe: stopped by SIGTERM\n"


@pytest.mark.parametrize("argv", [["--debug", "probe"], ["probe", "--debug"], ["probe", "x", "--debug", "y"]])
@pytest.mark.parametrize("error, code", [(InputError("no such thing"), 2), (ValueError("ours to fix"), 70)])
def test_debug_shows_the_traceback(
    command: types.ModuleType, argv: list[str], error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        raise error

    command.run = run  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(argv) == code
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("headwise probe: ")
    assert "--debug" not in seen[0]


def test_a_name_may_be_debug(command: types.ModuleType) -> None:
    seen: list[list[str]] = []
    command.run = lambda argv: (seen.append(argv), 0)[1]  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(["probe", "--", "--debug"]) == 0
    assert seen == [["--", "--debug"]]


def test_handlers_of_signals_are_given_back(command: types.ModuleType) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    command.run = raises(InputError("no"))  # pyright: ignore[reportAttributeAccessIssue]
    cli.main(["probe"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


# a process whose command writes a file, says "ready", and removes the file when it is stopped
STOPPABLE = """
import sys, time, types
from pathlib import Path
from headwise.cli import main as cli
def run(argv):
    file = Path(argv[0]); file.touch()
    try:
        print("ready", flush=True); time.sleep(60)
    finally:
        print("cleaning", flush=True); time.sleep(float(argv[1])); file.unlink()
    return 0
probe = types.ModuleType("probe"); probe.run = run
sys.modules["probe"] = probe; cli.COMMANDS["probe"] = ("probe", "")
sys.exit(cli.main(["probe", *sys.argv[1:]]))
"""


def stopped(tmp_path: Path, *numbers: int, cleaning: float = 0.0) -> tuple[int, str, bool]:
    """Exit code, stderr, and whether the file is still there, after these signals."""
    file = tmp_path / "unfinished"
    with subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, str(file), str(cleaning)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(numbers[0])
        assert process.stdout.readline() == "cleaning\n"
        for number in numbers[1:]:
            process.send_signal(number)
            time.sleep(0.1)
        process.wait(timeout=30)
        return process.returncode, process.stderr.read(), file.exists()


@pytest.mark.parametrize(
    "number, code, said",
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "stopped by SIGTERM"),
        (signal.SIGHUP, 129, "stopped by SIGHUP"),
    ],
)
def test_a_signal_ends_the_run_after_cleaning_up(tmp_path: Path, number: int, code: int, said: str) -> None:
    assert stopped(tmp_path, number) == (code, f"headwise probe: {said}\n", False)


def test_a_second_signal_does_not_stop_cleaning_up(tmp_path: Path) -> None:
    code, said, left = stopped(tmp_path, signal.SIGINT, signal.SIGINT, cleaning=0.5)
    assert (code, left) == (130, False)
    assert said == "removing unfinished files; once more to stop at once\nheadwise probe: interrupted\n"


def test_a_third_signal_ends_at_once(tmp_path: Path) -> None:
    code, _, left = stopped(tmp_path, signal.SIGINT, signal.SIGINT, signal.SIGTERM, cleaning=60)
    assert (code, left) == (143, True)


def test_an_interruption_while_python_ends_is_ignored() -> None:
    code = (
        "import os, signal, sys\n"
        "from headwise.cli.main import main\n"
        "sys.argv = ['headwise', 'kernels', '--no-such-option']\n"
        "code = main()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr


# a process that is interrupted at its k-th import after the first lines of the command
STARTING = """
import os, sys
wanted = int(sys.argv.pop(1))
before = {"headwise", "headwise.__main__", "_signal", "__future__", "importlib", "warnings"}
class Finder:
    def find_spec(self, name, path=None, target=None):
        global wanted
        if name not in before:
            wanted -= 1
            if wanted == 0:
                os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Finder())
from headwise.__main__ import start
sys.exit(start())
"""


@pytest.mark.parametrize("moment", [1, 2, 5, 10, 20, 30])
def test_an_interruption_while_python_imports_the_command(moment: int) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", STARTING, str(moment), "--version"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(headwise.__file__).parents[1])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "headwise: interrupted\n")


def in_a_shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = line.replace("headwise", f"{shlex.quote(sys.executable)} -m headwise", 1)
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_a_closed_or_full_output(tmp_path: Path) -> None:
    done = in_a_shell("headwise tour --side 3 2>&-")
    assert (done.returncode, done.stderr) == (2, "")
    done = in_a_shell("headwise tour --side 3 >&-")
    assert (done.returncode, done.stderr) == (2, "headwise tour: --side is 3; it must be at least 4\n")
    if Path("/dev/full").exists():
        done = in_a_shell("headwise tour --side 4 --json >/dev/full")
        assert (done.returncode, done.stderr) == (2, "headwise tour: No space left on device\n")


def test_a_current_directory_that_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = in_a_shell('cd "$FOLDER" && rmdir "$FOLDER" && headwise models', FOLDER=str(folder))
    said = "headwise models: the current directory cannot be read (No such file or directory); change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("columns", ["0", "00"])
def test_a_terminal_of_no_columns(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["models"]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_an_output_that_is_not_unicode() -> None:
    done = in_a_shell("headwise tour --side 4", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u03c3" in done.stdout  # singular values


def test_an_argument_that_is_not_utf_8(tmp_path: Path) -> None:
    command = [os.fsencode(sys.executable), b"-m", b"headwise", b"compare", b"\xff\xfe", b"b"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(b"headwise compare: there is no directory \\udcff\\udcfe;")


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


@pytest.mark.parametrize("line", ["plan python:no_such:thing -o out --json", "rewrite --plan plan -o out"])
def test_a_missing_package_is_named_before_the_work(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "safetensors" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    assert "needs safetensors, which is not installed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
