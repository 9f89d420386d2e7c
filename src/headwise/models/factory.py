"""Call the factory that `python:module:factory` names: the one place where headwise runs a user's own code."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch import nn

from headwise.errors import InputError


def call_factory(spec: str) -> tuple[nn.Module, Any]:
    """(model, batches or None) from `python:module:factory`; modules in the current directory can be imported."""
    parts = spec.split(":")
    if len(parts) != 3 or parts[0] != "python" or not all(parts):
        raise InputError(f"{spec}: write python:module:factory, such as python:my_project.model:build")
    _, name, attribute = parts
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(name), attribute)
    except ImportError as error:
        raise InputError(f"{spec}: cannot import {name!r} from {os.getcwd()} ({error})") from error
    except AttributeError as error:
        raise InputError(f"{spec}: module {name!r} has no {attribute!r}") from error
    made = factory()
    model, batches = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec}: the factory returned {type(model).__name__}, not a torch module")
    return model, batches
