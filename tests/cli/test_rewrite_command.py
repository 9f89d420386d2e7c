"""`headwise rewrite` names the arguments that are missing."""

from __future__ import annotations

import pytest

from headwise.cli.rewrite_command import run


def test_plan_and_output_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["pool"])
    error = capsys.readouterr().err
    assert "headwise rewrite [MODEL] --plan PLAN -o DIR" in error
    assert "the following arguments are required: --plan" in error
