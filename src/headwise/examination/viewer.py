"""Look at an examination: its page in a browser, or below the cell of a notebook."""

from __future__ import annotations

import html
import sys
import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.examination.record import Examination
from headwise.examination.report.page import report_page, write_report

HEIGHT = 900
"""Pixels of the page in a notebook."""


@dataclass(frozen=True)
class PageFrame:
    """A page as notebooks display it: in a frame, so that its styles and its script do not meet the notebook's."""

    page: str

    def __repr__(self) -> str:
        return f"<page of {len(self.page.encode()) >> 10} kB>"

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe srcdoc="{html.escape(self.page)}" style="{style}" title="headwise report"></iframe>'


def show(examination: Examination, directory: str | Path | None, *, force: bool) -> Any:
    """See `Examination.show`."""
    if directory is not None:
        page = write_report(examination, directory, force=force)[0]
    elif in_notebook():
        return PageFrame(report_page(examination))
    else:
        page = Path(tempfile.mkdtemp(prefix="headwise-")) / "report.html"
        page.write_text(report_page(examination), encoding="utf-8")
    if in_notebook():
        return PageFrame(page.read_text(encoding="utf-8"))
    webbrowser.open(page.resolve().as_uri())  # False where there is no browser: the path is returned in any case
    return page


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; IPython in a terminal is not."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None
