"""Load a model from a directory, a hub name, a .gguf file, `python:module:factory`, or the name of a sample model.

Weights come from safetensors or GGUF.  Pickled weights and code that comes with a model can run anything, so they are
refused unless `Trust` permits them (`gate`).  A model that cannot be loaded whole raises `InputError`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from headwise.errors import InputError
from headwise.models import gate
from headwise.models.factory import call_factory
from headwise.models.gate import UNTRUSTED, Trust, one_line, transformers_library
from headwise.models.samples.openai_whisper import load_whisper
from headwise.models.samples.sample_models import SAMPLES
from headwise.models.weight_files import check_directory

__all__ = ["DTYPES", "SAMPLES", "LoadedModel", "Trust", "load_model", "one_line", "save_preprocessor"]

FORMS = (
    "MODEL is a directory with config.json and weights, a .gguf file, a hub name such as org/model, python:…, "
    f"or one of {', '.join(SAMPLES)}"
)
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
FILE_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth", ".pt2", ".json", ".py", ".onnx"}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in eval mode, and what is needed to make inputs for it."""

    model: nn.Module
    name: str
    source: Path | str  # where its tokenizer or processor is found
    gguf: str | None = None  # file name inside `source`
    batches: Iterable[Any] | None = None  # inputs that a factory returned beside its model
    trust: Trust = UNTRUSTED
    notes: tuple[str, ...] = ()  # what was not loaded, though it does not matter for attention
    preprocessors: Mapping[str, Any] = field(default_factory=dict)  # auto class -> what it would load from `source`

    @property
    def is_factory(self) -> bool:
        return str(self.source).startswith("python:")

    @property
    def lacks_tokenizer(self) -> bool:
        """Whether transformers would build an empty tokenizer, which maps every word to "unknown"."""
        if not isinstance(self.source, Path) or self.gguf is not None:
            return False
        return not any((self.source / name).exists() for name in TOKENIZER_FILES)

    def preprocessor(self, auto_class: Any) -> Any:
        """The tokenizer, image processor or feature extractor of this model, loaded by `auto_class.from_pretrained`."""
        if auto_class.__name__ in self.preprocessors:
            return self.preprocessors[auto_class.__name__]
        options = {} if self.gguf is None else {"gguf_file": self.gguf}
        return gate.from_pretrained(auto_class, self.source, self.trust, **options)


def load_model(
    spec: str | None = None,
    *,
    with_head: bool = False,
    trust: Trust = UNTRUSTED,
    allow_missing: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Load the model that `spec` names (default: the sample `minilm`).

    with_head      load the class that the config names, such as LlamaForCausalLM; otherwise the model ends at its last
                   hidden states
    allow_missing  keep random numbers where the file has no weights; otherwise that raises InputError
    device         such as cuda; default: the CPU, and where a factory put its model
    dtype          one of DTYPES; default: float32, and what a factory chose
    """
    spec = "minilm" if spec is None else spec
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    place = None if device is None else checked_device(device)
    if spec.startswith("python:"):
        model, batches = call_factory(spec)
        check_values(spec, model)
        model = model if dtype is None else nn.Module.to(model, DTYPES[dtype])
        loaded = LoadedModel(model.eval(), spec.rpartition(":")[2], spec, batches=batches)
    else:
        loaded = _load(spec, with_head, trust, allow_missing, DTYPES[dtype or "float32"])
    if place is not None:
        nn.Module.to(loaded.model, place)
    return loaded


def checked_device(name: str) -> torch.device:
    """The device called `name`; InputError unless tensors can be put there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"the device {name!r} cannot be used here ({one_line(error)}); leave it out for the CPU"
        ) from error
    if device.type == "meta":
        raise InputError("the device 'meta' holds no values, so nothing can be measured there; use cpu")
    return device


def _load(spec: str, with_head: bool, trust: Trust, allow_missing: bool, dtype: torch.dtype) -> LoadedModel:
    """A model that no factory makes."""
    if spec == "whisper":
        path = SAMPLES[spec].located()
        model, extractor = load_whisper(path, dtype)
        extractors = {"AutoFeatureExtractor": extractor}
        return LoadedModel(model.eval(), SAMPLES[spec].title, path.parent, preprocessors=extractors)
    name, source, gguf = _locate(spec)
    if isinstance(source, Path) and gguf is None:
        check_directory(source, trust.allow_pickle)  # before transformers reads the config, which says less
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    if isinstance(source, str) and _is_offline():
        options["local_files_only"] = True
    config = _config(spec, source, trust, options)
    if isinstance(getattr(config, "headwise", None), dict):  # this class would ignore the replaced heads
        raise InputError(
            f"{name} was rewritten by headwise, and this works on the original model; headwise.replacement.load opens "
            "the rewritten one, headwise compare ORIGINAL REWRITTEN measures how far they differ"
        )
    model, info = _pretrained(source, trust, {**options, "dtype": dtype}, _model_class(config, with_head))
    notes = _check_missing(name, set(info["missing_keys"]) - _computed(model, config, info), allow_missing)
    check_values(name, model)
    if gguf is not None:
        _forget_quantization(model)
    return LoadedModel(model.eval(), name, source, gguf, trust=trust, notes=notes)


def _forget_quantization(model: Any) -> None:
    """The weights of a GGUF file are floats once loaded; marked as quantized, they could not be saved."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)


def check_values(name: str, model: nn.Module) -> None:
    """Raise InputError if some tensors are on the meta device, where they have no values."""
    meta = [key for key, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    if meta:
        raise InputError(
            f"{name}: {len(meta)} tensors are on the meta device and have no values, such as {meta[0]}; load the "
            "weights into the model first"
        )


def _locate(spec: str) -> tuple[str, Path | str, str | None]:
    """(name, directory or hub name, GGUF file in the directory or None) of anything but a factory."""
    if spec in SAMPLES:
        path = SAMPLES[spec].located()
        is_gguf = path.suffix == ".gguf"
        return SAMPLES[spec].title, path.parent if is_gguf else path, path.name if is_gguf else None
    try:
        path = Path(spec).expanduser()
        if path.is_symlink():
            path.stat()  # raises for a link to itself or to nothing
        is_file, is_directory, name = path.is_file(), path.is_dir(), path.resolve().name
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is too long, a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {spec[:100]!r}: {reason}; {FORMS}") from error
    if is_file and path.suffix == ".gguf":
        return path.stem, path.parent, path.name
    if is_file:
        raise InputError(f"{spec} is a file; {FORMS}")
    if is_directory:
        return name, path, None
    is_name = HUB_NAME.fullmatch(spec) is not None and path.suffix not in FILE_SUFFIXES
    is_mistyped = len(path.parts) == 2 and path.parent.is_dir()  # a/b, where the directory a exists
    if not is_name or (is_mistyped and not _in_hub_cache(spec)):
        raise InputError(f"there is no directory {spec}; {FORMS}")
    return spec, spec, None


def _in_hub_cache(name: str) -> bool:
    """Whether a model of the hub was downloaded before."""
    transformers_library()
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # not a possible name
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    return False


def _is_offline() -> bool:
    """Whether the hub's host has no address here; asking for a model would then only wait for time-outs."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return not getproxies()
    return False


def _config(spec: str, source: Path | str, trust: Trust, options: dict[str, Any]) -> Any:
    try:
        return gate.from_pretrained(transformers_library().AutoConfig, source, trust, **options)
    except InputError as error:
        if isinstance(source, Path) or not isinstance(error.__cause__, OSError):
            raise
        raise InputError(
            f"there is no directory {spec}, and no model of that name was found on the hub "
            f"({one_line(error.__cause__)}); {FORMS}"
        ) from error


def _model_class(config: Any, with_head: bool) -> Any:
    transformers = transformers_library()
    named = next(iter(getattr(config, "architectures", None) or ()), None)
    # some, such as an encoder and a decoder put together, have no class without a head
    with_head = with_head or type(config) not in transformers.AutoModel._model_mapping
    if with_head and named is None and type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM  # a GGUF file, which names no class, holds a language model
    cls = getattr(transformers, named, None) if with_head and isinstance(named, str) else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else transformers.AutoModel


def _pretrained(source: Path | str, trust: Trust, options: dict[str, Any], cls: Any) -> tuple[Any, dict[str, Any]]:
    try:
        return gate.pretrained_model(cls, source, trust, attn_implementation="sdpa", **options)
    except InputError as error:
        # a family without sdpa is loaded as it is: the interception then names its attention classes
        reason = str(error.__cause__)
        if "sdpa" not in reason and "scaled_dot_product_attention" not in reason:
            raise
        return gate.pretrained_model(cls, source, trust, **options)


def _computed(model: Any, config: Any, info: dict[str, Any]) -> set[str]:
    """Missing tensors that the class named by the config does not save because it computes them, such as sinusoids."""
    patterns = getattr(_model_class(config, True), "_keys_to_ignore_on_load_missing", None) or ()
    names = {key: (key, f"{model.base_model_prefix}.{key}") for key in info["missing_keys"]}
    return {key for key, forms in names.items() if any(re.search(p, form) for p in patterns for form in forms)}


def _check_missing(name: str, missing: Collection[str], allow_missing: bool) -> tuple[str, ...]:
    """Notes on weights that the file does not have; InputError if attention depends on them."""
    pooler = sorted(key for key in missing if "pooler" in key.split("."))  # comes after all attention
    others = sorted(set(missing) - set(pooler))
    shown = ", ".join(others[:5]) + (" …" if len(others) > 5 else "")
    if others and not allow_missing:
        raise InputError(
            f"{name}: the file has no weights for {len(others)} tensors of the model, which would be random: {shown}; "
            "check that config.json belongs to the weights, or pass --allow-missing to go on"
        )
    notes = (f"{name}: {len(others)} tensors are random, as the file has no weights for them: {shown}",)
    return notes * bool(others) + (f"{name}: the file has no pooler, which does not affect attention",) * bool(pooler)


def save_preprocessor(loaded: LoadedModel, directory: Path) -> None:
    """Save the tokenizer, image processor and feature extractor that the model has beside the weights."""
    if loaded.is_factory:
        return
    transformers = transformers_library()
    kinds = (transformers.AutoTokenizer, transformers.AutoImageProcessor, transformers.AutoFeatureExtractor)
    for auto_class in kinds[loaded.lacks_tokenizer :]:
        with suppress(Exception):  # a model has none, one, or a tokenizer beside one of the others
            loaded.preprocessor(auto_class).save_pretrained(directory)
