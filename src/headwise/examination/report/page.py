"""An Examination as files: report.html (one file, no network), report.json, and figures for a paper."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError, needs_extra
from headwise.examination.comparison import read_report
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.record import Examination
from headwise.examination.report.report_figures import COLOURS, draw, figure_names
from headwise.outputs import write_bytes, write_text

HERE = Path(__file__).parent


def write_report(examination: Examination, directory: Path) -> list[Path]:
    """Write report.html, report.json and figures/ in `directory`; return their paths in that order."""
    figures, html, facts = draw(examination), report_page(examination), examination.to_json()
    for name in figure_names():
        if name not in figures:  # of an earlier report in this directory
            (directory / "figures" / name).unlink(missing_ok=True)
    for name, content in figures.items():
        write_bytes(directory / "figures" / name, content)
    write_text(directory / "report.json", facts)
    write_text(directory / "report.html", html)
    return [directory / "report.html", directory / "report.json", directory / "figures"]


def report_page(examination: Examination) -> str:
    """The whole page as one string, with styles, script and data."""
    return _page(examination.to_dict())


def add_plan(directory: Path, plan: Mapping[str, Any]) -> Path:
    """Write report.html in `directory` again, from its report.json and a plan (the result of Plan.to_dict)."""
    facts = read_report(directory)
    if facts["model"]["class"] != plan["model"]["class"]:
        raise InputError(
            f"{directory} examined a {facts['model']['class']}, but the plan is for a {plan['model']['class']}; "
            "give the report of the same model"
        )
    write_text(directory / "report.html", _page({**facts, "plan": dict(plan)}))
    return directory / "report.html"


def _page(facts: dict[str, Any]) -> str:
    with needs_extra("report", "the report"):
        import jinja2
        from markupsafe import Markup

    def read(name: str) -> str:
        return (HERE / name).read_text(encoding="utf-8")

    template = jinja2.Environment(autoescape=True).from_string(read("report.html"))
    css, script, model = read("report.css"), read("report.js"), facts["model"]
    facts = {
        **facts,
        "records": [{name: x for name, x in record.items() if name != "by_text"} for record in facts["records"]],
        "redundancy": [[None if x is None else round(x, 2) for x in row] for row in facts["redundancy"]],
        "kinds": {kind: {"colour": COLOURS[kind], "meaning": meaning} for kind, meaning in KINDS.items()},
    }
    # "</script>" inside a token must not end the element
    data = json.dumps(facts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.render(
        title=model["name"],
        subtitle=f"{model['class']}, {model['parameters']:,} parameters, {len(facts['records'])} heads, "
        f"{facts['inputs']['texts']} inputs",
        headline=facts["headline"],
        version=facts["provenance"].get("headwise", ""),
        policy=_policy(css, script),
        css=Markup(css),
        script=Markup(script),
        data=Markup(data),
    )


def _policy(css: str, script: str) -> str:
    """A Content-Security-Policy that allows this style and this script, by their hashes, and nothing else.

    Images may be data: URLs, for the empty icon.  No other script runs, no request is made and no form is sent, even
    if a name or a text should find its way into the page as markup.
    """

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = {
        "default-src": "'none'",
        "script-src": hashed(script),
        "style-src": hashed(css),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
