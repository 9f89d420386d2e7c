"""Command-line arguments that several commands share, and the loading of the model and inputs they name.

A command calls `add_model`, `add_inputs`, `add_output` and `add_json` on its parser, then `load(options)` and
`make_inputs(options, loaded)`.  Nothing here imports torch before one of the last two is called.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.cli.progress import bar
from headwise.errors import InputError

if TYPE_CHECKING:
    from headwise.models.inputs import Inputs
    from headwise.models.load import LoadedModel

MODEL_HELP = (
    "a directory or hub name for transformers, a .gguf file, python:module:factory, or minilm, which is "
    "all-MiniLM-L6-v2 from its package (default: minilm)"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL --allow-pickle --trust-remote-code"""
    parser.add_argument("model", nargs="?", default="minilm", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--allow-pickle", action="store_true", help="load pickled weights, which can run code")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_inputs(
    parser: argparse._ActionsContainer,
    *,
    texts: int | None,
    texts_default: str = "%(default)s",
    kinds: Collection[str] = ("images", "audio"),
) -> None:
    """--text | --images | --audio | --random-tokens, --length, --texts

    texts   default of --texts; None if the command decides, which `texts_default` then explains
    kinds   which inputs other than text the command takes
    """
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="plain text (default: Moby-Dick, shipped)")
    if "images" in kinds:
        source.add_argument("--images", type=Path, metavar="DIR", help="a directory of images")
    if "audio" in kinds:
        source.add_argument("--audio", nargs="+", type=Path, metavar="FILE", help="recordings")
    source.add_argument("--random-tokens", type=int, metavar="N", help="texts of N random tokens each")
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens in each text (default: 512, or the model's maximum if less)"
    )
    most = f"at most K texts (default: {texts_default})"
    parser.add_argument("--texts", type=int, default=texts, metavar="K", help=most)


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
    path = None if default is None else Path(default)
    parser.add_argument("-o", "--out", type=Path, default=path, required=required, metavar=metavar, help=described)


def add_force(parser: argparse.ArgumentParser) -> None:
    """--force"""
    parser.add_argument("--force", action="store_true", help="replace the results of an earlier run, unless edited")


def add_json(parser: argparse.ArgumentParser, what: str = "the result") -> None:
    """--json --quiet"""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress bars")


def is_quiet(options: argparse.Namespace) -> bool:
    return options.json or options.quiet


def check_at_least(options: argparse.Namespace, **minimum: int) -> None:
    """Raise InputError for an option below its minimum; options that were not given are skipped."""
    for name, least in minimum.items():
        value = getattr(options, name, None)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")


def load(options: argparse.Namespace, *, with_head: bool = False) -> LoadedModel:
    """The model that `add_model`'s options name; `with_head` as in `load_model`."""
    from headwise.models.load import load_model

    with bar("loading the model", None, quiet=is_quiet(options)):
        return load_model(
            options.model,
            with_head=with_head,
            allow_pickle=options.allow_pickle,
            trust_remote_code=options.trust_remote_code,
        )


def make_inputs(options: argparse.Namespace, loaded: LoadedModel) -> Inputs:
    """The batches that `add_inputs`'s options name; a factory's own batches if it returned some."""
    from headwise.models import inputs

    check_at_least(options, texts=1, random_tokens=4, batch=1)
    given: dict[str, Any] = vars(options)
    if loaded.batches is not None:
        batches = list(itertools.islice(loaded.batches, options.texts))
        return inputs.Inputs(batches, None, {"kind": "the factory's own batches"})
    if given.get("images") is not None:
        return inputs.image_input(loaded, options.images, limit=options.texts)
    if given.get("audio") is not None:
        return inputs.audio_input(loaded, options.audio, limit=options.texts)
    if options.random_tokens is not None:
        seed = given.get("seed", 0)
        return inputs.random_tokens(loaded, options.random_tokens, texts=options.texts, seed=seed)
    batch = given.get("batch", 1)
    return inputs.text_input(loaded, options.text, length=options.length, texts=options.texts, batch=batch)
