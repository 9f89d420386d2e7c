"""`load(directory)`: a rewritten model of transformers as `save_pretrained` left it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.rewrite.models import PREFIX, VERSION, rewritten_class


def load(directory: str | Path, **options: Any) -> nn.Module:
    """The model saved in `directory`, in eval mode; options are those of `from_pretrained`.

    `AutoModel.from_pretrained` would read the same files as the original model, all of its heads exact.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError("this needs transformers; pip install 'headwise[models]'") from error
    path = Path(directory).expanduser()
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json; name the directory that save_pretrained wrote")
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
