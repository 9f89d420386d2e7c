"""A rewritten model on disk: `save` writes it, `load(directory)` restores it bit for bit.

Models of transformers are saved by `save_pretrained`; others as weights and the plan, to be loaded into the original
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.models.load import LoadedModel, quietly, save_preprocessor, transformers_library
from headwise.outputs import OutputDirectory, writing
from headwise.replacement.install.other_models import RewrittenModel
from headwise.replacement.install.transformers_models import PREFIX, rewritten_class
from headwise.replacement.plans import Plan, installed_choices
from headwise.replacement.rewriting import rewrite

WEIGHTS = "rewritten.safetensors"


def load(directory: str | Path, *, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The rewritten model saved in `directory`, in eval mode; options are those of `from_pretrained`.

    `model` is the original, needed for models that are not of transformers.  (`AutoModel.from_pretrained` would read
    the same files as the original model, without replacements.)
    """
    path = Path(directory).expanduser()
    if (path / WEIGHTS).is_file():
        if model is None:
            raise InputError(f"{path} holds weights and a plan; pass the original model too: load(directory, model=…)")
        return _load_weights(path, model)
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; name the directory that save_pretrained wrote")
    transformers = transformers_library()
    config = transformers.AutoConfig.from_pretrained(str(path))
    plan = getattr(config, "headwise", None)
    if not isinstance(plan, dict):
        raise InputError(f"{path} holds a model that was not rewritten; load it with AutoModel.from_pretrained")
    installed_choices(plan, f"{path / 'config.json'}: headwise")
    names = getattr(config, "architectures", None) or [""]
    base = getattr(transformers, names[0].removeprefix(PREFIX), None)
    if base is None:
        raise InputError(f"{path} holds a {names[0]}, which this version of transformers does not have")
    return rewritten_class(base).from_pretrained(str(path), config=config, **options)


def save(new: nn.Module, plan: Plan, out: OutputDirectory, loaded: LoadedModel | None = None) -> None:
    """Write everything `load` needs, and the plan; with `loaded`, its tokenizer or processor too."""
    plan.save(out)
    if isinstance(new, RewrittenModel):
        from safetensors.torch import save_model

        with out.atomic(WEIGHTS) as path:
            save_model(new, str(path))
        return
    with writing(out.path):
        quietly(lambda: new.save_pretrained(out.staged))  # type: ignore[operator]
        if loaded is not None:
            save_preprocessor(loaded, out.staged)


def _load_weights(path: Path, model: nn.Module) -> nn.Module:
    from safetensors.torch import load_model

    new, _ = rewrite(model, Plan.load(path))
    try:
        load_model(new, str(path / WEIGHTS))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{path} does not hold the weights of this {type(model).__name__}: {first}") from error
    return new.eval()
