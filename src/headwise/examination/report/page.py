"""An Examination as files: report.html (one file, no network), report.json, and figures for a paper.

All of them are written beside the target and renamed at the end, so that an interrupted run leaves no half report.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.examination.record import Examination

HERE = Path(__file__).parent


def write(examination: Examination, out: Path) -> list[Path]:
    """report.html, report.json and figures/ in `out`; returns their paths in that order."""
    from headwise.examination.report.report_figures import draw

    beside = out / f".writing-{os.getpid()}"
    try:
        (beside / "figures").mkdir(parents=True)
        (beside / "report.html").write_text(page(examination), encoding="utf-8")
        (beside / "report.json").write_text(examination.to_json(), encoding="utf-8")
        draw(examination, beside / "figures")
        shutil.rmtree(out / "figures", ignore_errors=True)
        for name in ("figures", "report.json", "report.html"):
            (beside / name).replace(out / name)
    except OSError as error:
        raise InputError(f"cannot write the report to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return [out / "report.html", out / "report.json", out / "figures"]


def page(examination: Examination) -> str:
    """The whole page as one string: styles, script and data inside."""
    return _page(examination.to_dict())


def add_plan(out: Path, plan: Mapping[str, Any]) -> Path:
    """Write report.html in `out` again, from its report.json, with a view of a plan (what Plan.to_dict gives)."""
    from headwise.examination.compare import read

    facts = read(out)
    if facts["model"]["class"] != plan["model"]["class"]:
        raise InputError(
            f"{out} examined a {facts['model']['class']}, but the plan is for a {plan['model']['class']}; "
            "give the report of the same model"
        )
    beside = out / f".writing-{os.getpid()}.html"
    try:
        beside.write_text(_page({**facts, "plan": dict(plan)}), encoding="utf-8")
        beside.replace(out / "report.html")
    except OSError as error:
        raise InputError(f"cannot write the report to {out}: {error.strerror or error}") from error
    return out / "report.html"


def _page(facts: dict[str, Any]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise InputError("the report needs jinja2 and matplotlib; pip install 'headwise[report]'") from error
    template = jinja2.Environment(autoescape=True).from_string((HERE / "report.html").read_text(encoding="utf-8"))
    facts["redundancy"] = [[None if x is None else round(x, 2) for x in row] for row in facts["redundancy"]]
    # "</script>" inside a token must not end the element
    data = json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    model = facts["model"]
    return template.render(
        title=model["name"],
        subtitle=f"{model['class']}, {model['parameters']:,} parameters, {len(facts['records'])} heads, "
        f"{facts['data']['texts']} inputs",
        headline=facts["headline"],
        version=facts["made"].get("headwise", ""),
        css=_raw("report.css"),
        script=_raw("report.js"),
        data=_safe(data),
    )


def _raw(name: str) -> object:
    return _safe((HERE / name).read_text(encoding="utf-8"))


def _safe(text: str) -> object:
    from markupsafe import Markup

    return Markup(text)
