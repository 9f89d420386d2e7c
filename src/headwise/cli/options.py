"""Command-line arguments that several commands share, and the loading of the model and inputs they name.

A command calls `add_model`, `add_inputs`, `add_output` and `add_json` on its parser, then `load(options)` and
`make_inputs(options, loaded)`.  Nothing here imports torch before one of the last two is called.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import datetime
import itertools
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headwise.errors import InputError, check_extra
from headwise.progress import bar

if TYPE_CHECKING:
    from headwise.models.gate import Trust
    from headwise.models.inputs import Inputs
    from headwise.models.load import LoadedModel

MODEL_HELP = (
    "a directory or hub name for transformers, a .gguf file, python:module:factory, or a sample model, which "
    "`headwise models` lists (default: minilm)"
)


TOKENS, TEXTS, SEEDS = (4, 1 << 24), (1, 1_000_000), (0, 2**63 - 1)
"""Smallest and largest values of options that several commands have."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors, and that refuses options given twice and abbreviated options."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = None if args is None else list(args)
        self._check(given or [])
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        # the types below say "is 0; it must be at least 1", and argparse puts "argument --texts: " before it
        ours = re.fullmatch(r"argument (\S+): (is .*)", message, flags=re.DOTALL)
        raise InputError(f"{ours[1]} {ours[2]}" if ours else f"{message}; see {self.prog} --help")

    def _check(self, args: list[str]) -> None:
        given = set()
        for arg in itertools.takewhile(lambda arg: arg != "--", args):
            if "\0" in arg:
                self.error(f"an argument holds a NUL character: {arg!r}")
            name, _, value = arg.partition("=") if arg.startswith("--") else (arg[:2], "", arg[2:].removeprefix("="))
            action = self._option_string_actions.get(name)
            if action is not None and action.nargs != 0 and value == "--":
                self.error(f"{name} is '--'; give a value")  # argparse drops it, and the value is an empty list
            if action is not None and action.nargs != 0 and action.dest in given:
                self.error(f"{name} is given twice")
            given.add(None if action is None else action.dest)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Type of an option: an integer from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"is {text[:40]!r}; it must be a whole number") from error
        if value < least or value > most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"is {text[:40]}; it must be {bound}")
        return value

    return parse


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Type of an option: a finite number of at least `least` and at most `most`."""
    limits = f"at least {least:g}" + (f" and at most {most:g}" if math.isfinite(most) else "")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"is {text[:40]!r}; it must be a number") from error
        if not math.isfinite(value) or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"is {text[:40]}; it must be a finite number of {limits}")
        return value

    return parse


def nonempty(text: str) -> str:
    """Type of an argument: any text but the empty one, which is what an unset variable of a shell gives."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a name")
    return text


def file_path(text: str) -> Path:
    """Type of an argument: a file or directory, which need not exist."""
    path = Path(nonempty(text))
    try:
        path.expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"is {text[:40]!r}, but there is no such home directory") from error
    return path


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, and the options of `add_loading`"""
    parser.add_argument("model", nargs="?", type=nonempty, default="minilm", metavar="MODEL", help=MODEL_HELP)
    add_loading(parser)


def add_loading(parser: argparse._ActionsContainer) -> None:
    """--device --dtype --allow-missing --allow-pickle --trust-remote-code"""
    parser.add_argument(
        "--device", type=nonempty, metavar="NAME", help="where the model runs, such as cuda (default: cpu)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "float64"),
        help="precision the model runs in (default: float32; a factory's model as it is)",
    )
    missing = "go on if weights are missing, with random numbers in their place"
    parser.add_argument("--allow-missing", action="store_true", help=missing)
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights, which can run code")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_inputs(
    parser: argparse._ActionsContainer,
    *,
    texts: int | None,
    texts_default: str = "%(default)s",
    kinds: Collection[str] = ("images", "audio"),
    text_help: str = "plain text (default: Moby-Dick, shipped)",
) -> None:
    """--text | --images | --audio | --random-tokens, --length, --texts

    texts   default of --texts; None if the command decides, which `texts_default` then explains
    kinds   which inputs other than text the command takes
    """
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", nargs="+", type=file_path, metavar="FILE", help=text_help)
    if "images" in kinds:
        source.add_argument("--images", type=file_path, metavar="DIR", help="a directory of images")
    if "audio" in kinds:
        source.add_argument("--audio", nargs="+", type=file_path, metavar="FILE", help="recordings")
    source.add_argument(
        "--random-tokens", type=whole_number(*TOKENS), metavar="N", help="texts of N random tokens each"
    )
    parser.add_argument(
        "--length",
        type=whole_number(*TOKENS),
        metavar="N",
        help="tokens in each text (default: the length that the model declares, at most 512)",
    )
    most = f"at most K texts (default: {texts_default})"
    parser.add_argument("--texts", type=whole_number(*TEXTS), default=texts, metavar="K", help=most)


def add_output(
    parser: argparse.ArgumentParser,
    *,
    default: str | None = None,
    metavar: str = "DIR",
    required: bool = False,
    help: str = "where to write",
) -> None:
    """-o, --out"""
    described = help if default is None else f"{help} (default: %(default)s)"
    parser.add_argument(
        "-o",
        "--out",
        type=file_path,
        default=default and Path(default),
        required=required,
        metavar=metavar,
        help=described,
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """--force"""
    parser.add_argument("--force", action="store_true", help="replace the results of an earlier run, unless edited")


def add_json(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    """--json --quiet"""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def is_quiet(options: argparse.Namespace) -> bool:
    return options.json or options.quiet


def add_seed(parser: argparse._ActionsContainer, what: str = "of the random numbers") -> None:
    """--seed"""
    help = f"{what} (default: %(default)s)"
    parser.add_argument("--seed", type=whole_number(*SEEDS), default=0, metavar="N", help=help)


def load(options: argparse.Namespace, *, with_head: bool = False) -> LoadedModel:
    """The model that `add_model`'s options name; `with_head` as in `load_model`."""
    from headwise.models.load import load_model

    for option, package in (("images", "PIL"), ("audio", "soundfile")):
        if getattr(options, option, None) is not None:
            check_extra("models", f"--{option}", package)
    with bar("loading the model", None, quiet=is_quiet(options)):
        loaded = load_model(
            options.model,
            with_head=with_head,
            trust=trust(options),
            allow_missing=options.allow_missing,
            device=options.device,
            dtype=options.dtype,
        )
    given = vars(options)
    if "text" in given and not loaded.is_factory:  # a command that makes inputs
        from headwise.models.inputs import part_that_takes

        kinds = {"images": given.get("images"), "recordings": given.get("audio")}
        loaded = part_that_takes(loaded, next((kind for kind, x in kinds.items() if x is not None), "text"))
    _print_notes(loaded.notes)
    return loaded


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def trust(options: argparse.Namespace) -> Trust:
    """What --allow-pickle and --trust-remote-code permit."""
    from headwise.models.gate import Trust

    return Trust(options.allow_pickle, options.trust_remote_code)


def make_inputs(options: argparse.Namespace, loaded: LoadedModel) -> Inputs:
    """The batches that `add_inputs`'s options name; a factory's own batches if it returned some."""
    made = _made_inputs(options, loaded)
    _print_notes(made.description.get("notes", ()))
    if options.device is None and options.dtype is None:
        return made
    from headwise.models.load import DTYPES
    from headwise.models.run import placed

    dtype = None if options.dtype is None else DTYPES[options.dtype]
    return dataclasses.replace(made, batches=[placed(batch, options.device, dtype) for batch in made.batches])


def _made_inputs(options: argparse.Namespace, loaded: LoadedModel) -> Inputs:
    from headwise.models.factory import take_batches
    from headwise.models.inputs import Inputs, random_tokens, text_input

    given: dict[str, Any] = vars(options)
    sources = [name for name in ("text", "images", "audio", "random_tokens") if given.get(name) is not None]
    if loaded.batches is not None:
        _refuse_unused(given, [*sources, "length"], "the factory returned batches of its own")
        batches = take_batches(str(loaded.source), loaded.batches, options.texts)
        return Inputs(batches, None, {"kind": "the factory's own batches"})
    if sources not in ([], ["text"]):
        _refuse_unused(given, ["length"], f"--{sources[0].replace('_', '-')} is given")
    if given.get("images") is not None:
        from headwise.models.media.images import image_input

        return image_input(loaded, options.images, limit=options.texts)
    if given.get("audio") is not None:
        from headwise.models.media.recordings import audio_input

        return audio_input(loaded, options.audio, limit=options.texts)
    if options.random_tokens is not None:
        return random_tokens(loaded, options.random_tokens, texts=options.texts, seed=given.get("seed", 0))
    batch = given.get("batch", 1)
    return text_input(loaded, options.text, length=options.length, texts=options.texts, batch=batch)


def _refuse_unused(given: dict[str, Any], names: Sequence[str], reason: str) -> None:
    """Raise InputError for an option that would have no effect."""
    for name in names:
        if given.get(name) is not None:
            raise InputError(f"--{name.replace('_', '-')} would have no effect, because {reason}; leave it out")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=whole_number(1, 10_000_000),
        default=TIMEOUT,
        metavar="SECONDS",
        help="with torchrun: how long processes wait for one that does not answer (default: %(default)s)",
    )


TIMEOUT = 1800
"""Seconds; that of torch."""


def join_processes(timeout: int = TIMEOUT) -> tuple[int, int]:
    """(rank, number of processes); started by torchrun, join the other processes."""
    processes = _from_launcher("WORLD_SIZE", 1)
    if processes == 1:
        return 0, 1
    _from_launcher("RANK", 0, processes - 1)
    _from_launcher("MASTER_PORT", 0, 65535)
    import torch
    import torch._dynamo  # before the process group, whose threads it would keep beyond its end
    import torch.distributed as dist

    if not dist.is_initialized():
        if not os.environ.get("MASTER_ADDR"):
            raise InputError(f"WORLD_SIZE is {processes}, but MASTER_ADDR is not set; {LAUNCH}")
        has_gpus = torch.cuda.is_available()
        if has_gpus:
            torch.cuda.set_device(_from_launcher("LOCAL_RANK", 0) % torch.cuda.device_count())
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=datetime.timedelta(seconds=timeout)
            )
        except (RuntimeError, ValueError) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(f"{NOT_JOINED} {processes - 1} processes: {reason[:200]}; {LAUNCH}") from error
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        from headwise.distributed.collectives import Ranks

        Ranks.of(None).introduced()
    return dist.get_rank(), processes


NOT_JOINED = "cannot join the other"
LAUNCH = "start several processes with torchrun, or unset WORLD_SIZE for one"


def _from_launcher(name: str, least: int, most: int = 1_000_000) -> int:
    """A variable that torchrun sets; without WORLD_SIZE there is one process."""
    given = os.environ.get(name, "").strip()
    if name == "WORLD_SIZE" and not given:
        return 1
    if not given.isdecimal() or not least <= int(given[:20]) <= most:
        what = f"is {given[:40]!r}" if given else "is not set"
        raise InputError(f"{name} {what}, but must be a whole number from {least} to {most}; {LAUNCH}")
    return int(given)


def said_by_another(sentence: str) -> bool:
    """Whether another process of torchrun says why the run ends, so that a user reads it once.

    Before the processes have joined, all have the same command line, of which the first speaks.  Afterwards the first
    that fails speaks: others with the same sentence, or that are stopped or have lost a process after it, are silent.
    """
    size, rank = (os.environ.get(name, "").strip()[:20] for name in ("WORLD_SIZE", "RANK"))
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size) > 1):
        return False  # one process, or nonsense to complain of
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return int(rank) > 0 and not sentence.startswith(NOT_JOINED)
    is_consequence = any(
        text in sentence for text in ("has ended or hangs", "has ended (see the output", "stopped by SIGTERM")
    )
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the process that has the store has ended
            store = dist.distributed_c10d._get_default_store()
            failed = store.add("headwise has failed", 1)
            answers.append(failed if is_consequence else store.add(f"headwise says {sentence}", 1))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LONGEST_ANSWER)  # the process that has the store may hang, and then this would, too
    return bool(answers) and answers[0] > 1


LONGEST_ANSWER = 5.0
"""Seconds within which a store of numbers answers."""


def named_rank(sentence: str) -> str:
    """`sentence` with the rank of this process before it, if it has joined others and does not say so itself."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() == 1 or sentence.startswith("rank "):
        return sentence
    return f"rank {dist.get_rank()} of {dist.get_world_size()}: {sentence}"


def wait_for_processes(processes: int) -> None:
    """Until the first process has taken the lock and removed partial results of an earlier run."""
    if processes > 1:
        import torch

        from headwise.distributed.collectives import Ranks, largest

        ranks = Ranks.of(None)
        largest(torch.zeros(1, device=ranks.device), ranks)
