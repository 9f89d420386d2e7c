"""One head's operator as a person writes it in a plan: {"kind": "window", "width": 65, "first": 1}.

A Choice is a name and a few numbers, checked when it is made; what they mean is in `kinds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

from headwise.errors import InputError
from headwise.replacement.kinds import KINDS, Kind

__all__ = ["EXACT", "KINDS", "Choice", "Kind"]


@final
@dataclass(frozen=True)
class Choice:
    """A kind of operator and its options; options left out take their defaults, so equal choices compare equal.

    >>> Choice("window", {"width": 65}) == Choice.from_dict({"kind": "window", "width": 65, "first": 0})
    True
    """

    kind: str
    options: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.of
        unknown = [name for name in self.options if name not in known.options]
        if unknown:
            allowed = ", ".join(known.options) or "no options"
            raise InputError(f"{self.kind}: unknown option {', '.join(map(repr, unknown))}; it has {allowed}")
        given = {name: option.default for name, option in known.options.items()} | dict(self.options)
        for name, value in given.items():
            given[name] = _checked(self.kind, name, value, known)
        object.__setattr__(self, "options", MappingProxyType(given))

    @property
    def of(self) -> Kind:
        """What its name stands for."""
        if self.kind not in KINDS:
            raise InputError(f"unknown kind of operator {self.kind!r}; the known ones are {', '.join(KINDS)}")
        return KINDS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.options}

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Choice:
        if not isinstance(d, Mapping) or not isinstance(d.get("kind"), str):
            raise InputError(f'an operator is written {{"kind": "window", "width": 65}}, but a plan has {d!r}')
        return Choice(d["kind"], {name: value for name, value in d.items() if name != "kind"})

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.options.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return Choice, (self.kind, dict(self.options))  # a mapping proxy cannot be copied

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{name}={value:g}" for name, value in self.options.items())])


def _checked(kind: str, name: str, value: Any, known: Kind) -> int | float:
    option = known.options[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{kind}: {name} must be a number, but is {value!r}")
    if isinstance(option.default, int):
        if value != int(value):
            raise InputError(f"{kind}: {name} must be a whole number, but is {value!r}")
        value = int(value)
    if option.least is not None and value < option.least:
        raise InputError(f"{kind}: {name} must be at least {option.least}, but is {value}")
    return value


EXACT = Choice("exact")
