"""Models of transformers whose heads have other query/key widths, in memory and on disk (see `derived_models`).

Their config.json holds the widths, and an attention implementation that does not exist, so that stock classes refuse
the files instead of loading a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from headwise.errors import InputError, UnsupportedError
from headwise.models.pretrained.derived_models import Change, changed_modules, derive, read_changed_config
from headwise.models.widths.head_dimensions import HeadDimensions
from headwise.models.widths.widened_attention import NAME, attach, attention_sites, register


def resized(model: Any, probe: dict[str, Any] | None = None) -> dict[str, nn.Module]:
    """The attention modules of a transformers model by name, each with HeadDimensions that change nothing yet.

    The model becomes an instance of a subclass of its class.  A model that has them already is left as it is.
    """
    known = {name: module for name, module in model.named_modules() if getattr(module, NAME, None) is not None}
    if known:
        return known
    if getattr(model.config, "headwise", None) is not None:
        raise UnsupportedError(f"{type(model).__name__} was rewritten; resize heads before rewriting them")
    sites = attention_sites(model, probe)
    for site in sites:
        attach(site.module, HeadDimensions(site.heads, site.key_heads, site.key_width, site.inputs))
    if sites:
        derive(model, RESIZED)
    return {site.name: site.module for site in sites}


def widths(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What config.json says of each attention module; empty if no head has another width."""
    found = {name: getattr(module, NAME, None) for name, module in model.named_modules()}
    all_of_them = {name: x for name, x in found.items() if isinstance(x, HeadDimensions)}
    changed = any(any(x.added) or x.kept is not None for x in all_of_them.values())
    return {name: x.config() for name, x in all_of_them.items()} if changed else {}


def _install(model: Any) -> None:
    """HeadDimensions where the config says."""
    sites: Mapping[str, Any] = getattr(model.config, NAME)
    for site, module in changed_modules(model, RESIZED, sites):
        try:
            dimensions = HeadDimensions(**sites[site])
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise InputError(f"config.json: {NAME}: {site}: {sites[site]} are not sizes of heads") from error
        attach(module, dimensions)


class _Saved:
    """`save_pretrained` of a resized model."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a model in which no head has another width is saved as what it was."""
        self.config.headwise_widths = widths(self)
        if self.config.headwise_widths:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        state = {name: x for name, x in self.state_dict().items() if f".{NAME}." not in name}
        config_class, model_class = type(self.config), type(self)
        self.config.__class__, self.__class__ = config_class.__base__, model_class.__bases__[-1]
        del self.config.headwise_widths
        try:
            return self.save_pretrained(*args, **{"state_dict": state, **kwargs})
        finally:
            self.config.__class__, self.__class__ = config_class, model_class


def _mixins(base: type) -> tuple[type, ...]:
    return (_Saved,)


RESIZED = Change(NAME, "widths", "save the resized model again", register, _install, _mixins)
read_config = partial(read_changed_config, RESIZED)
