"""The files that a model directory loads its weights from: safetensors inside the directory, or InputError.

transformers reads whatever an index names, pickles and files elsewhere included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError, needs_extra
from headwise.reading import anything, map_of, read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LARGEST_SIZE = 10**8
SIZE = re.compile(r"(size|dim|layers?|heads?|positions|embeddings|embd|length|kernel)$")
LAYERS = re.compile(r"layers?$")


def check_directory(directory: Path, allow_pickle: bool) -> None:
    """Raise InputError unless `directory` has a readable config and weights that can be loaded without running code."""
    if not (directory / "config.json").exists():
        raise InputError(f"{directory} has no config.json; point MODEL at the directory that save_pretrained wrote")
    config = read_json(
        directory / "config.json", map_of(anything), "the directory that save_pretrained wrote", foreign=True
    )
    tensors = sum(_tensor_count(path) for path in weight_files(directory, config, allow_pickle))
    check_config(str(directory), config, tensors)


def weight_files(directory: Path, config: Mapping[str, Any], allow_pickle: bool) -> list[Path]:
    """The safetensors files that transformers is going to read; empty if they are pickles and these are allowed."""
    if (directory / "adapter_config.json").exists():
        raise InputError(f"{directory} holds an adapter (adapter_config.json); merge it into its model and save that")
    named = config.get("transformers_weights")
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise InputError(f"{directory}/config.json: transformers_weights must name safetensors, but is {named!r}")
        path = _inside(directory, named, "config.json")
        return check_index(path, allow_pickle) if named.endswith(".json") else [path]
    if (directory / WEIGHTS).exists():
        return [_inside(directory, WEIGHTS, str(directory))]
    if (directory / INDEX).exists():
        return check_index(_inside(directory, INDEX, str(directory)), allow_pickle)
    pickles = sorted(path for pattern in PICKLES for path in directory.glob(pattern))
    if not pickles:
        raise InputError(f"{directory} has a config.json but no weights; {WEIGHTS} is missing")
    if not allow_pickle:
        raise InputError(
            f"{directory} holds its weights as a pickle ({pickles[0].name}), which can run code when loaded; convert "
            "it to safetensors, or pass --allow-pickle if you trust it"
        )
    return []


def check_index(path: Path, allow_pickle: bool = False) -> list[Path]:
    """The safetensors files that an index names, each in the directory of the index (or below it)."""
    names = read_json(path, map_of(anything), "an index of weights", foreign=True).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{path}: weight_map must list a file name for every tensor; save the model again")
    files = []
    for name in sorted(set(names.values())):
        if not name.endswith(".safetensors") and not allow_pickle:
            raise InputError(
                f"{path} names {name}, which is not safetensors and could run code when loaded; save the model as "
                "safetensors, or pass --allow-pickle if you trust it"
            )
        file = _inside(path.parent, name, str(path))
        if not file.is_file() and path.parent.resolve() == path.resolve().parent:  # not in the hub's cache yet
            raise InputError(f"{path} names {name}, which does not exist")
        if name.endswith(".safetensors") and file.is_file():
            files.append(file)
    return files


def check_config(name: str, config: Mapping[str, Any], tensors: int | None = None) -> None:
    """Raise InputError for sizes that no model has, and for attention implementations that would be downloaded."""
    for key, value in _items(config):
        if key in ("attn_implementation", "_attn_implementation") and "/" in str(value):
            raise InputError(
                f"{name}: {key} of config.json is {value!r}, code that would be downloaded and run; remove it"
            )
        if not isinstance(value, int) or not SIZE.search(key):
            continue
        if value > LARGEST_SIZE:
            raise InputError(f"{name}: {key} of config.json is {value}, which is too large for any model")
        if tensors is not None and LAYERS.search(key) and value > max(1000, tensors):
            raise InputError(f"{name}: {key} of config.json is {value}, but its weights hold {tensors} tensors")


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) at any depth."""
    for key, x in value.items() if isinstance(value, Mapping) else ():
        yield key, x
        yield from _items(x)


def _inside(directory: Path, name: str, source: str) -> Path:
    """directory / name, if that is a file of the directory; links may lead into the hub cache the directory is in."""
    path = directory / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise InputError(f"{source} names {name}, a file outside of {directory}; it is not loaded")
    try:
        root, target = directory.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    # the hub's cache: models--org--name/snapshots/<revision>/<file> is a link to models--org--name/blobs/<hash>
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise InputError(f"{path} is a link to {target}, outside of {directory}; it is not loaded")
    return path


def _tensor_count(path: Path) -> int:
    """The number of tensors in a safetensors file; reads its header only."""
    with needs_extra("models", "loading the model"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as file:
            return len(file.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is damaged or not a safetensors file ({error}); download or save it again") from error
