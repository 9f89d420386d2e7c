"""Whatever a factory does, the answer is a model or one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models.factory import call_factory, take_batches

BAD = {
    "raise ZeroDivisionError('no')": "the factory raised ZeroDivisionError: no",
    "raise SystemExit(0)": "the factory raised SystemExit: 0",
    "import sys; sys.exit('bye')": "the factory raised SystemExit: bye",
    "raise MemoryError": "the factory raised MemoryError",
    "return build()": "the factory raised RecursionError",
    "return None": "returned NoneType, not a torch module",
    "return nn.Linear": "returned type, not a torch module",
    "return ()": "returned 0 values",
    "return nn.Linear(2, 2), [], 3": "returned 3 values",
    "return [], nn.Linear(2, 2)": "returned list, not a torch module",
    "return nn.Linear(2, 2), {'x': torch.ones(2)}": r"its batches as dict; return a list, such as \[batch\]",
    "return nn.Linear(2, 2), torch.ones(2)": "its batches as Tensor; return a list",
    "return nn.Linear(2, 2), 7": "its batches as int; return a list",
    "return nn.Linear(2, 2), 'text'": "its batches as str; return a list",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "made_up", raising=False)
    return tmp_path / "made_up.py"


@pytest.mark.parametrize("body, message", BAD.items(), ids=BAD)
def test_what_a_factory_does_wrong_is_named(body: str, message: str, module: Path) -> None:
    module.write_text(f"import torch\nfrom torch import nn\ndef build():\n    {body}\n")
    with pytest.raises(InputError, match=f"python:made_up:build: .*{message}"):
        call_factory("python:made_up:build")


@pytest.mark.parametrize(
    "text, message",
    [
        ("raise ValueError('no')", "importing 'made_up' raised ValueError: no"),
        ("raise SystemExit(3)", "importing 'made_up' raised SystemExit: 3"),
        ("import no_such_package", "cannot import 'made_up' .*no_such_package"),
        ("def broken(:", "importing 'made_up' raised SyntaxError"),
        ("build = 3", "'build' is a int, not a function"),
        ("x = 3", "module 'made_up' has no 'build'"),
    ],
)
def test_modules_that_cannot_be_used(text: str, message: str, module: Path) -> None:
    module.write_text(text + "\n")
    with pytest.raises(InputError, match=message):
        call_factory("python:made_up:build")


@pytest.mark.parametrize(
    "spec", ["python:", "python:a", "python::", "python:a:", "python:a:b:c", "python:.:x", "python:.a:x"]
)
def test_malformed_names(spec: str) -> None:
    with pytest.raises(InputError, match="write python:module:factory"):
        call_factory(spec)


def test_the_current_directory_comes_last_afterwards(module: Path) -> None:
    """A file of the user's directory must not take the place of a module that a package imports later on."""
    module.write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    assert isinstance(call_factory("python:made_up:build")[0], nn.Linear)
    assert sys.path.count(str(module.parent)) == 1
    assert sys.path[-1] == str(module.parent)


def test_batches_are_checked_as_they_are_taken() -> None:
    def endless():
        while True:
            yield torch.ones(2)

    def failing():
        yield torch.ones(2)
        raise KeyError("x")

    assert len(take_batches("python:a:b", endless(), 3)) == 3
    with pytest.raises(InputError, match="its batches raised KeyError"):
        take_batches("python:a:b", failing(), 3)
    with pytest.raises(InputError, match="no batches"):
        take_batches("python:a:b", [], 3)
    with pytest.raises(InputError, match="a batch is a str"):
        take_batches("python:a:b", ["text"], 3)


def test_a_factory_without_batches_is_told_to_return_some(module: Path, capsys: pytest.CaptureFixture) -> None:
    module.write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    assert main(["examine", "python:made_up:build", "-o", str(module.parent / "out")]) == 2
    assert "returned no batches; return (model, [batch, …])" in capsys.readouterr().err
