"""A rewritten model on disk: `save` writes it, `load(directory)` gives it back bit for bit.

Models of transformers are what `save_pretrained` writes; others are their weights and the plan, to be loaded into the
model they were made from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from headwise.errors import InputError
from headwise.models.load import LoadedModel, quietly, save_preprocessor, transformers_library
from headwise.replacement.install.other_models import Rewritten
from headwise.replacement.install.transformers_models import PREFIX, VERSION, rewritten_class

if TYPE_CHECKING:
    from headwise.replacement.plan import Plan

WEIGHTS = "rewritten.safetensors"


def load(directory: str | Path, *, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The model saved in `directory`, in eval mode; options are those of `from_pretrained`.

    `model` is the original, for models that are not of transformers.  `AutoModel.from_pretrained` would read the same
    files as the original model, all of its heads exact.
    """
    path = Path(directory).expanduser()
    if (path / WEIGHTS).is_file():
        if model is None:
            raise InputError(
                f"{path} holds weights and a plan; pass the model they belong to: load(directory, model=…)"
            )
        return _foreign(path, model)
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; name the directory that save_pretrained wrote")
    transformers = transformers_library()
    config = transformers.AutoConfig.from_pretrained(str(path))
    plan = getattr(config, "headwise", None)
    if not isinstance(plan, dict):
        raise InputError(f"{path} holds a model that was not rewritten; load it with AutoModel.from_pretrained")
    if plan.get("version") != VERSION:
        raise InputError(f"{path} was written with version {plan.get('version')} of the plan, this reads {VERSION}")
    names = getattr(config, "architectures", None) or [""]
    base = getattr(transformers, names[0].removeprefix(PREFIX), None)
    if base is None:
        raise InputError(f"{path} holds a {names[0]}, which this version of transformers does not have")
    return rewritten_class(base).from_pretrained(str(path), config=config, **options)


def save(new: nn.Module, plan: Plan, directory: Path, loaded: LoadedModel | None = None) -> None:
    """Everything `load` needs, and the plan; with `loaded`, what reads text or pictures too."""
    plan.save(directory)
    if isinstance(new, Rewritten):
        from safetensors.torch import save_model

        save_model(new, str(directory / WEIGHTS))
        return
    quietly(lambda: new.save_pretrained(directory))  # type: ignore[operator]
    if loaded is not None:
        save_preprocessor(loaded, directory)


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name when all went well, and is gone otherwise."""
    out = out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; name a new directory")
    beside = out.parent / f".{out.name}-{os.getpid()}"
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write to {out.parent}: {error.strerror or error}") from error
    try:
        yield beside
        if out.exists():
            out.rmdir()
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _foreign(path: Path, model: nn.Module) -> nn.Module:
    from safetensors.torch import load_model

    from headwise.replacement.plan import Plan
    from headwise.replacement.rewrite import rewrite

    new, _ = rewrite(model, Plan.load(path))
    try:
        load_model(new, str(path / WEIGHTS))
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{path} does not hold the weights of this {type(model).__name__}: {first}") from error
    return new.eval()
