"""An Examination as files: report.html (one file, no network), report.json, and figures for a paper."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError, needs_extra, shown
from headwise.examination.comparison import read_report
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.record import Examination
from headwise.examination.report.report_figures import COLOURS, draw, figure_names
from headwise.output_directory import OutputDirectory, directory_for

HERE = Path(__file__).parent


def report_names() -> list[str]:
    """Every file that a report may have."""
    return ["report.html", "report.json", *(f"figures/{name}" for name in figure_names())]


def write_report(
    examination: Examination, directory: str | Path | OutputDirectory, *, force: bool = False
) -> list[Path]:
    """Write report.html, report.json and figures/ in `directory`; return their paths in that order.

    An earlier report there is replaced with `force`; files that headwise did not write are never replaced.
    """
    with directory_for(directory, command="examine", names=report_names(), force=force) as out:
        out.key = str(examination.provenance.get("run", ""))
        for name, content in draw(examination).items():
            out.write_bytes(f"figures/{name}", content)
        out.write_text("report.json", examination.to_json())
        out.write_text("report.html", report_page(examination))
        return [out.path / "report.html", out.path / "report.json", out.path / "figures"]


def report_page(examination: Examination) -> str:
    """The whole page as one string, with styles, script and data."""
    return _page(examination.to_dict())


def add_plan(directory: Path, plan: Mapping[str, Any]) -> Path:
    """Write report.html in `directory` again, from its report.json and a plan (the result of Plan.to_dict)."""
    with OutputDirectory(directory, command="examine", names=["report.html"], force=True) as out:
        facts = read_report(out.path)
        of_report, of_plan = facts["model"]["class"], plan["model"]["class"]
        if of_report != of_plan:
            raise InputError(
                f"{shown(directory)} examined a {of_report}, but the plan is for a {of_plan}; give the report of the "
                "same model"
            )
        examined, planned = facts["provenance"].get("weights"), plan["model"].get("fingerprint")
        if None not in (examined, planned) and examined != planned:
            raise InputError(
                f"{shown(directory)} examined a {of_report} whose weights differ from those the plan is for; give the "
                "report of the same model"
            )
        out.key = str(facts["provenance"].get("run", ""))
        return out.write_text("report.html", _page({**facts, "plan": dict(plan)}))


def check_report(directory: Path) -> None:
    """Raise InputError unless `add_plan` can be called for `directory`."""
    read_report(directory)
    with OutputDirectory(directory, command="examine", names=["report.html"], force=True):
        pass


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
