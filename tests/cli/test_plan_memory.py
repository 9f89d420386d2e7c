"""`headwise plan` asks the C library to return freed blocks, where it knows how."""

from __future__ import annotations

import ctypes

import pytest

from headwise.cli.plan_command import M_MMAP_THRESHOLD, return_freed_memory


def test_freed_blocks_are_returned_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Glibc:
        def mallopt(self, name: int, value: int) -> int:
            calls.append((name, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Glibc())
    return_freed_memory()
    assert calls == [(M_MMAP_THRESHOLD, 4 << 20)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # another C library
    return_freed_memory()
    assert len(calls) == 1
