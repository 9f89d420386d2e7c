"""Masks and caches of every kind are tested on a rotary model too, although plans refuse some kinds there."""

from __future__ import annotations

import pytest

from headwise.replacement import plans


@pytest.fixture(autouse=True)
def any_kind_with_rotary_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "has_rotary_positions", lambda model: False)
