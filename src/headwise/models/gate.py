"""The only place where a file may run code: unpickling, exported programs, `from_pretrained`, a user's own module.

Without permission nothing here runs code that comes with a file: pickles are read by torch's restricted unpickler,
weights come from safetensors or GGUF inside the model's directory, custom code of a model is refused without asking,
and an exported program is loaded only if every part of it is plain data (`program_archive`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from headwise.errors import HeadwiseError, InputError, needs_extra
from headwise.models.program_archive import check_program
from headwise.models.weight_files import check_config, check_directory, check_index


@final
@dataclass(frozen=True)
class Trust:
    """What a file may do: `--allow-pickle` and `--trust-remote-code`."""

    allow_pickle: bool = False
    trust_remote_code: bool = False


UNTRUSTED = Trust()


def load_tensors(path: str | Path) -> Any:
    """Tensors and plain values saved by torch.save; anything else, or a damaged file, raises InputError."""
    path = Path(path)
    with failures(f"cannot read {path} as tensors saved by torch.save"):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > path.stat().st_size:
                raise InputError(f"{path} unpacks to {unpacked} bytes, more than torch.save writes; it is not loaded")
        try:
            return torch.load(path, weights_only=True, map_location="cpu")
        except OSError:
            raise
        except Exception as error:
            raise InputError(
                f"{path} was not saved by torch.save, is damaged, or holds more than tensors and plain values, which "
                "could run code; it is not loaded"
            ) from error


def load_program(path: str | Path, trust: Trust) -> torch.export.ExportedProgram:
    """The program in a .pt2 file.  Without `allow_pickle`, one in which anything could run code raises InputError."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is not a file; name an exported program (.pt2)")
    log = logging.getLogger("torch.export")
    level = log.level
    log.setLevel(logging.CRITICAL)  # torch logs the traceback of an error that it then raises
    try:
        with failures(f"{path} is not an exported program that this version of torch reads"):
            content = path.read_bytes()
            if not trust.allow_pickle:
                check_program(path, content)
            return torch.export.load(io.BytesIO(content))
    finally:
        log.setLevel(level)


def from_pretrained(auto_class: Any, source: Path | str, trust: Trust, **options: Any) -> Any:
    """auto_class.from_pretrained(source) for configs, tokenizers and processors.

    Code that comes with them is refused without a prompt.  Every failure is an InputError.
    """
    if isinstance(source, Path):
        options["local_files_only"] = True
    with failures(f"cannot load {source}"):
        try:
            with quiet():
                return auto_class.from_pretrained(str(source), trust_remote_code=trust.trust_remote_code, **options)
        except (ValueError, ImportError) as error:
            if "trust_remote_code" not in str(error):
                raise
            raise InputError(
                f"{source} comes with its own code, which can do anything when loaded; read it, and pass "
                "--trust-remote-code (trust_remote_code=True) if you trust it"
            ) from error


def pretrained_model(model_class: Any, source: Path | str, trust: Trust, **options: Any) -> tuple[Any, dict[str, Any]]:
    """(model, loading info of transformers) from the weights of a directory or hub name, or the GGUF file in `options`.

    Without `allow_pickle` the weights are safetensors, in files of the directory itself.
    """
    gguf = options.get("gguf_file")
    if gguf is None:
        if isinstance(source, Path):
            check_directory(source, trust.allow_pickle)
        else:
            _check_hub(source, trust, options.get("local_files_only", False))
        if not trust.allow_pickle:
            options["use_safetensors"] = True
    return from_pretrained(model_class, source, trust, output_loading_info=True, **options)


def import_module(name: str) -> ModuleType:
    """A user's module; modules in the current directory can be imported, and take precedence while this one runs."""
    directory = os.getcwd()
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)  # last, so that later imports of other packages find no file of this directory


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Libraries raise errors of every type on files that they cannot read; all become InputError, `what (reason)`."""
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise InputError(f"{what} ({reason})") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # an assertion in the Rust code of tokenizers or safetensors
            raise
        raise InputError(f"{what} ({one_line(error)})") from error


def transformers_library() -> Any:
    with needs_extra("models", "loading the model"):
        import transformers
    return transformers


def forget_names_in_files(model: Any) -> None:
    """A model that was loaded keeps the names that its files gave to tensors, and is saved with them.

    The subclasses of headwise load tensors by the names of the modules, so they must be saved by these.
    """
    vars(model).pop("_weight_conversions", None)


def one_line(error: BaseException) -> str:
    """Type and first line of an error, at most 300 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _check_hub(name: str, trust: Trust, local_files_only: bool) -> None:
    """The config and index of a model on the hub, read before its weights."""
    from transformers import PretrainedConfig
    from transformers.utils.hub import cached_file

    with failures(f"cannot load {name}"), quiet():
        config: Mapping[str, Any] = PretrainedConfig.get_config_dict(name, local_files_only=local_files_only)[0]
        check_config(name, config)
        if not trust.allow_pickle:
            index = cached_file(
                name,
                "model.safetensors.index.json",
                local_files_only=local_files_only,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if index is not None:
                check_index(Path(index))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of transformers and the hub's client."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, bars, hub_verbosity = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        hub_logging.get_verbosity(),
    )
    gguf_files: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    gguf_bar = gguf_files.tqdm  # of tqdm itself, which no setting of transformers reaches
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf_files.tqdm = functools.partial(gguf_bar, disable=True)
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        gguf_files.tqdm = gguf_bar
        hub_logging.set_verbosity(hub_verbosity)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
