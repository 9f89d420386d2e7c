"""`bench fidelity --tensors`: a file that does not hold q, k and v gets a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.cli.main import main

X = torch.randn(1, 2, 16, 8)
BAD: dict[str, tuple[Any, str]] = {
    "a list": ([X, X, X], "must be a dictionary of tensors q, k and v, but has no tensor 'q'"),
    "no v": ({"q": X, "k": X}, "has no tensor 'v'"),
    "numbers": ({"q": 1, "k": X, "v": X}, "has no tensor 'q'"),
    "integers": ({"q": X.long(), "k": X, "v": X}, "q must be (*batch, n, width) in floating point"),
    "one axis": ({"q": X[0, 0, 0], "k": X, "v": X}, "q must be (*batch, n, width) in floating point"),
    "empty": ({"q": X, "k": X[..., :0, :], "v": X}, "k must be (*batch, n, width) in floating point"),
    "sparse": ({"q": X, "k": X.to_sparse(), "v": X}, "k must be (*batch, n, width)"),
    "widths": ({"q": X[..., :4], "k": X, "v": X}, "q (1, 2, 16, 4), k (1, 2, 16, 8), v (1, 2, 16, 8) do not fit"),
    "lengths": ({"q": X, "k": X, "v": X[..., :9, :]}, "v (1, 2, 9, 8) do not fit"),
    "heads": ({"q": X, "k": X[:, :1], "v": X[:, :1]}, "do not fit"),
    "repeated": ({"q": X[:1, :1, :1, :1].expand(10**4, 1, 10**4, 8), "k": X, "v": X}, "repeats fewer stored numbers"),
    "nan": ({"q": X, "k": X.clone().fill_(torch.nan), "v": X}, "not finite"),
    "infinite": ({"q": X, "k": X, "v": X.clone().fill_(torch.inf)}, "not finite"),
    "dtypes": ({"q": X, "k": X.double(), "v": X}, "torch.float64"),
}


@pytest.mark.parametrize("value, message", BAD.values(), ids=BAD)
def test_tensors_that_cannot_be_used(value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save(value, tmp_path / "x.pt")
    assert main(["bench", "fidelity", "--tensors", str(tmp_path / "x.pt")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x02.", b"\x89PNG\r\n\x1a\n\0\0"])
def test_files_that_hold_no_tensors(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    assert main(["bench", "fidelity", "--tensors", str(tmp_path / "x.pt")]) == 2
    assert "x.pt" in capsys.readouterr().err
    assert main(["bench", "fidelity", "--tensors", str(tmp_path / "nowhere.pt")]) == 2
    assert "nowhere.pt" in capsys.readouterr().err


def test_tensors_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"q": X, "k": X, "v": X}, tmp_path / "x.pt")
    assert main(["bench", "fidelity", "--tensors", str(tmp_path / "x.pt"), "--json"]) == 0
    assert '"rows"' in capsys.readouterr().out
