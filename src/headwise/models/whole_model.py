"""A model as it is used, in the class its config names: `examine` needs a decoder only up to its last states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headwise.errors import InputError
from headwise.models.load import Loaded, load_model, one_line, quietly, transformers_library


def load_whole(spec: str | None, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Loaded:
    """The model `spec` names, in the class its own config names."""
    loaded = load_model(spec, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    config = getattr(loaded.model, "config", None)
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None or name == type(loaded.model).__name__:
        return loaded
    cls = getattr(transformers_library(), name, None)
    if cls is None:
        return loaded
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    if loaded.gguf is not None:
        options["gguf_file"] = loaded.gguf
    elif not allow_pickle:
        options["use_safetensors"] = True
    if isinstance(loaded.source, Path):
        options["local_files_only"] = True
    try:
        model = quietly(lambda: cls.from_pretrained(str(loaded.source), **options))
    except Exception as error:  # every loader has errors of its own; all of them mean: this cannot be used
        raise InputError(f"cannot load {loaded.name} as {name}: {one_line(error)}") from error
    return replace(loaded, model=model.eval())


def save_reader(loaded: Loaded, directory: Path) -> None:
    """The tokenizer or processor beside the weights, so that the directory is a whole model; nothing if it has none."""
    if str(loaded.source).startswith("python:"):
        return
    transformers = transformers_library()
    options = {"gguf_file": loaded.gguf} if loaded.gguf else {}
    for kind in (transformers.AutoTokenizer, transformers.AutoImageProcessor, transformers.AutoFeatureExtractor):
        try:
            quietly(lambda kind=kind: kind.from_pretrained(str(loaded.source), **options).save_pretrained(directory))
        except Exception:  # a model has one of them, or none
            continue
        return
