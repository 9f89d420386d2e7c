"""The example of a long-input model runs at toy size and ends with its figures."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.slow
def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.long_bytes import main

    monkeypatch.setattr(sys, "argv", ["long_bytes.py", "--toy"])
    main()
    text = capsys.readouterr().out
    assert "loss on fresh text" in text
    assert text.count("times as fast") == 2
