"""Call the factory that `python:module:factory` names: it runs a user's own code, so whatever it does is named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError
from headwise.models import gate


def call_factory(spec: str) -> tuple[nn.Module, Iterable[Any] | None]:
    """(model, batches or None) from `python:module:factory`; modules in the current directory can be imported."""
    parts = spec.split(":")
    if len(parts) != 3 or parts[0] != "python" or not all(parts) or parts[1].startswith("."):
        raise InputError(f"{spec}: write python:module:factory, such as python:my_project.model:build")
    _, name, attribute = parts
    try:
        factory = getattr(gate.import_module(name), attribute)
    except ImportError as error:
        raise InputError(f"{spec}: cannot import {name!r} from {os.getcwd()} ({error})") from error
    except AttributeError as error:
        raise InputError(f"{spec}: module {name!r} has no {attribute!r}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: importing {name!r} raised {gate.one_line(error)}") from error
    if not callable(factory):
        raise InputError(f"{spec}: {attribute!r} is a {type(factory).__name__}, not a function that returns a model")
    try:
        made = factory()
    except HeadwiseError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec}: the factory raised {gate.one_line(error)}") from error
    if isinstance(made, tuple) and len(made) != 2:
        raise InputError(f"{spec}: the factory returned {len(made)} values; return the model, or (model, batches)")
    model, batches = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec}: the factory returned {type(model).__name__}, not a torch module")
    if batches is not None and (not isinstance(batches, Iterable) or isinstance(batches, (Mapping, Tensor, str))):
        raise InputError(
            f"{spec}: the factory returned its batches as {type(batches).__name__}; return a list, such as [batch]"
        )
    return model, batches


def take_batches(name: str, batches: Iterable[Any], limit: int | None) -> list[Any]:
    """The first `limit` batches of a factory: mappings, sequences of tensors, or tensors."""
    try:
        taken = list(itertools.islice(batches, limit))
    except HeadwiseError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{name}: its batches raised {gate.one_line(error)}") from error
    if not taken:
        raise InputError(f"{name}: the factory returned no batches; return at least one")
    for batch in taken:
        if not isinstance(batch, (Mapping, Tensor, list, tuple)):
            raise InputError(f"{name}: a batch is a {type(batch).__name__}; it must be a tensor, a dict or a list")
    return taken
