"""`headwise <command> …`: finds the command's module, runs it, and turns every failure into one sentence on stderr.

A command is a module with `run(argv: list[str]) -> int`.  Nothing here imports torch, so `headwise --help` is instant.

    0    done
    1    done, and the answer is no: a claim differs from the record, a model breaks a promise, a convolution was left
    2    could not be done: bad input, or files, disk or memory that cannot be used
    70   a bug in headwise
    129, 130, 143   stopped by SIGHUP, SIGINT (Ctrl-C), SIGTERM; unfinished files were removed
    141  the reader of the output has closed it

`--debug` anywhere on the line shows the traceback too.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from headwise import __version__
from headwise.cli.options import Parser, named_rank, said_by_another
from headwise.errors import HeadwiseError, InputError

BUG = 70
OUT_OF_MEMORY = (
    "MemoryError",
    "bad_alloc",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
    "failed to map segment",
    "could not create a primitive",
)
"""What torch and oneDNN write into a RuntimeError when an allocation fails, and the loader when there is no room."""

FILE_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors of the file system that torch and safetensors raise as exceptions of other types."""

# name -> (module, one line of help); a new command is one new line here
COMMANDS: dict[str, tuple[str, str]] = {
    "examine": ("headwise.cli.examine_command", "measure every head of a model: one page, one JSON file"),
    "compare": ("headwise.cli.compare_command", "differences between two examinations, or between two models"),
    "monitor": ("headwise.cli.monitor_command", "what a Monitor measured during training, as a page"),
    "verify": ("headwise.cli.verify_command", "does a model keep its promises; do papers' claims about attention hold"),
    "grow": (
        "headwise.cli.widths.grow_command",
        "train a small model that widens heads where they are too narrow",
    ),
    "shrink": (
        "headwise.cli.widths.shrink_command",
        "drop query/key dimensions that matter least",
    ),
    "plan": ("headwise.cli.plan_command", "the cheapest operator for every head within a tolerance"),
    "rewrite": ("headwise.cli.rewrite_command", "replace attention heads as a plan says, with a receipt"),
    "convert": ("headwise.cli.convert_command", "convert convolutions to attention, with a receipt"),
    "bench": (
        "headwise.cli.bench_command",
        "what attention costs: exponents over n, other packages, distance from exact",
    ),
    "kernels": (
        "headwise.cli.kernels_command",
        "the compiled CPU kernels: do they run, where are they, build them",
    ),
    "models": ("headwise.cli.models_command", "sample models that can be named, and how to install them"),
    "tour": ("headwise.cli.tour_command", "three operators, their spectra and costs, and one verdict"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments, debug = _without_debug(sys.argv[1:] if argv is None else argv)
    name = f"headwise {arguments[0]}" if arguments and arguments[0] in COMMANDS else "headwise"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show must not end the run
            stream.reconfigure(errors="backslashreplace")
    if not os.environ.get("COLUMNS", "80").strip("0"):  # without a terminal some shells say 0, and so would tables
        del os.environ["COLUMNS"]
    if "WORLD_SIZE" in os.environ:  # torch reads it when it is loaded: a lost process is a sentence, not C++ frames
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    received: list[int] = []
    try:
        with _signals(received, restore=argv is not None):
            code = _run(arguments)
            _flush()  # an error of the last write belongs here, not to the end of the interpreter
            return code
    except SystemExit:  # --help and --version
        raise
    except BaseException as error:  # extensions written in Rust raise a BaseException when they panic
        if debug:
            traceback.print_exception(error)
        # code that a signal stops halfway fails in its own ways: shutil.rmtree closes a descriptor twice
        code, sentence = _explained(_Stopped(received[0]) if received else error)
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, too
        if sentence and not said_by_another(sentence):
            said = _one_line(sentence).removeprefix(f"{name.rpartition(' ')[2]}: ")  # functions name themselves, too
            print(f"{name}: {named_rank(said)}", file=sys.stderr)
    try:
        _flush()
    except (OSError, ValueError):  # Python would try again at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _flush() -> None:
    if sys.stdout is not None:  # it is None if the process was started without
        sys.stdout.flush()


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        # --help and --version exit here; anything else is an unknown command
        _parser().parse_args(arguments or ["--help"])
    try:
        os.getcwd()
    except OSError as error:  # torch cannot be imported there
        raise InputError(f"the current directory cannot be read ({error.strerror}); change to another one") from error
    return importlib.import_module(COMMANDS[arguments[0]][0]).run(arguments[1:])


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without --debug, and whether it was among them; after -- it is a name."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [x for x in argv[:end] if x != "--debug"] + list(argv[end:]), "--debug" in argv[:end]


def _explained(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence for an exception.

    Other packages wrap errors of memory and files in exceptions of their own, so the causes count too.
    """
    reason, whole = _first_line(error), "\n".join(f"{type(cause).__name__}: {cause}" for cause in _causes(error))
    if isinstance(error, HeadwiseError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return (128 + error.number, str(error)) if isinstance(error, _Stopped) else (130, "interrupted")
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return 141, ""
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        return 2, f"{error.strerror or reason}{where}"
    if any(text in whole for text in OUT_OF_MEMORY):
        return 2, f"not enough memory; use fewer or shorter inputs, or a smaller model ({reason})"
    if any(os.strerror(number) in whole for number in FILE_SYSTEM):
        return 2, reason
    if isinstance(error, RecursionError):
        return 2, f"the input is nested too deeply ({reason})"
    if isinstance(error, UnicodeError):
        return 2, f"text that cannot be read or written ({reason})"
    return BUG, f"{reason}; this is a bug in headwise: run again with --debug for the traceback, and report it"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those during whose handling it was raised, latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _one_line(text: str) -> str:
    """`text` with line breaks as spaces and other unprintable characters escaped: file names may hold anything."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.splitlines()))


class _Stopped(KeyboardInterrupt):
    """A signal that asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
        self.number = number


@contextlib.contextmanager
def _signals(received: list[int], *, restore: bool) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises _Stopped; the second lets clean-up finish; the third ends at once.

    They are appended to `received`.  Afterwards the handlers are restored; if the process is about to end, SIGINT is
    ignored instead.
    """

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise _Stopped(number)
        if len(received) > 2:
            os._exit(128 + number)
        with contextlib.suppress(OSError):
            os.write(2, b"removing unfinished files; once more to stop at once\n")

    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            after = signal.SIG_IGN if number == signal.SIGINT and not restore else handler
            signal.signal(number, signal.SIG_DFL if after is None else after)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items())
    parser = Parser(
        prog="headwise",
        usage="headwise [--help] [--version] [--debug] <command> …",
        description="Attention as a linear operator: build it, measure it, test what is claimed of it, replace it.",
        epilog=f"commands:\n{listing}\n\n`headwise <command> --help` describes one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error; anywhere on the line")
    parser.add_argument("--version", action="version", version=f"headwise {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser
