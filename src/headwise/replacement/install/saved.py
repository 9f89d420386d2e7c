"""A rewritten model on disk: `save` writes it, `load(directory)` restores it bit for bit.

Models of transformers are saved by `save_pretrained`; others as weights and the plan, to be loaded into the original
model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import HeadwiseError, InputError
from headwise.models.gate import UNTRUSTED, Trust, from_pretrained, one_line, quiet, transformers_library
from headwise.models.load import LoadedModel, check_values, save_preprocessor
from headwise.models.pretrained.derived_models import PREFIX, check_complete
from headwise.models.weight_files import check_directory
from headwise.output_directory import OutputDirectory, check_unchanged
from headwise.outputs import writing
from headwise.replacement.install.other_models import RewrittenModel
from headwise.replacement.install.transformers_models import REWRITTEN, rewritten_class
from headwise.replacement.plans import Plan, installed_choices
from headwise.replacement.rewriting import rewrite

WEIGHTS = "rewritten.safetensors"


def load(
    directory: str | Path, *, model: nn.Module | None = None, trust: Trust = UNTRUSTED, **options: Any
) -> nn.Module:
    """The rewritten model saved in `directory`, in eval mode; options are those of `from_pretrained`.

    `model` is the original, needed for models that are not of transformers.  The others are also loaded by
    `AutoModel.from_pretrained` and the like, once headwise is imported.
    """
    path = Path(directory).expanduser()
    if (path / WEIGHTS).is_file():
        if model is None:
            raise InputError(f"{path} holds weights and a plan; pass the original model too: load(directory, model=…)")
        new = _load_weights(path, model)
        check_unchanged(path, ".safetensors")
        return new
    return _load_pretrained(path, trust, options)


def _load_pretrained(path: Path, trust: Trust, options: dict[str, Any]) -> nn.Module:
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; name the directory that save_pretrained wrote")
    check_directory(path, allow_pickle=False)
    transformers = transformers_library()
    config = from_pretrained(transformers.AutoConfig, path, trust)
    plan = getattr(config, "headwise", None)
    if not isinstance(plan, dict):
        raise InputError(f"{path} holds a model that was not rewritten; load it with AutoModel.from_pretrained")
    installed_choices(plan, f"{path / 'config.json'}: headwise")
    name = str(next(iter(getattr(config, "architectures", None) or ()), None))
    base = _original_class(transformers, config, name.removeprefix(PREFIX))
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise InputError(f"{path} holds a {name}, which this version of transformers does not have")
    try:
        new = from_pretrained(rewritten_class(base), path, trust, config=config, **options)
    except HeadwiseError as error:
        raise InputError(str(error) if str(path) in str(error) else f"cannot load {path}: {error}") from error
    check_values(str(path), new)
    return new


def _original_class(transformers: Any, config: Any, name: str) -> Any:
    """The class, also one that the library does not export, such as the encoder of a model; None if there is none."""
    known = transformers.MODEL_MAPPING.get(type(config).__base__, None)
    module = None if known is None else sys.modules.get(getattr(known, "__module__", ""))
    return getattr(transformers, name, None) or getattr(module, name, None)


def save(new: nn.Module, plan: Plan, out: OutputDirectory, loaded: LoadedModel | None = None) -> None:
    """Write the model, and the plan; with `loaded`, its tokenizer or processor too."""
    plan.save(out)
    if isinstance(new, RewrittenModel):
        from safetensors.torch import save_model

        with out.atomic(WEIGHTS) as path:
            save_model(new, str(path))
        return
    with writing(out.path):
        with quiet():
            new.save_pretrained(out.staged)  # type: ignore[operator]
        if loaded is not None:
            save_preprocessor(loaded, out.staged)


def _load_weights(path: Path, model: nn.Module) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    new, _ = rewrite(model, Plan.load(path))
    try:
        missing, unexpected = load_model(new, str(path / WEIGHTS), strict=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{path / WEIGHTS} does not hold the weights of this {type(model).__name__} ({one_line(error)})"
        ) from error
    check_complete(str(path / WEIGHTS), {"missing_keys": missing, "unexpected_keys": unexpected}, REWRITTEN)
    return new.eval()
