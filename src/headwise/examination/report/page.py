"""An Examination as files: report.html (one file, no network), report.json, and figures for a paper."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from headwise.errors import InputError, needs_extra, shown
from headwise.examination.comparison import read_report
from headwise.examination.measure.head_kinds import KINDS
from headwise.examination.record import Examination
from headwise.examination.report.kind_styles import kind_style
from headwise.examination.report.measure_groups import first_columns, grouped
from headwise.examination.report.report_figures import draw, figure_names
from headwise.examination.report.site_labels import head_address, site_labels
from headwise.models.inputs import TEXT_WORDS, in_words
from headwise.output_directory import OutputDirectory, directory_for

ASSETS = Path(__file__).parent / "assets"
REACH = 24
"""The farthest offset of which the page shows the mean weight."""

SHOWN_HEADS = 12
"""Heads that one piece of advice names on the page."""


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


def assembled_page(template: str, scripts: Sequence[str], data: Mapping[str, Any], **fields: Any) -> str:
    """A page from a template among the assets: `data` for its scripts, `fields` for the template."""
    with needs_extra("report", "the report"):
        import jinja2
        from markupsafe import Markup

    css, script = _asset("report.css"), "\n".join(_asset(name) for name in scripts)
    # "</script>" inside a token must not end the element
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return (
        jinja2.Environment(autoescape=True)
        .from_string(_asset(template))
        .render(policy=_policy(css, script), css=Markup(css), script=Markup(script), data=Markup(text), **fields)
    )


def page_words(facts: Mapping[str, Any]) -> dict[str, str]:
    """What one input and one position of it are called: text and token, image and patch, recording and frame."""
    given = facts["inputs"].get("words")
    return {key: str(given.get(key, word)) if isinstance(given, Mapping) else word for key, word in TEXT_WORDS.items()}


def page_data(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a report as its script reads them: fewer digits, and only what is shown."""
    measured = {name for record in facts["records"] for name in (*record["measures"], *record["modes"])}
    labels, words = site_labels([site["name"] for site in facts["sites"]]), page_words(facts)
    return {
        "model": facts["model"],
        "inputs": facts["inputs"],
        "words": words,
        "measures": grouped(facts["measures"]),
        "columns": first_columns(measured),
        "sites": [{**site, "label": label} for site, label in zip(facts["sites"], labels, strict=True)],
        "records": [_record(record) for record in facts["records"]],
        "telling": telling_heads(facts),
        "similarity": _similarity(facts["redundancy"]),
        "kinds": {kind: {**kind_style(kind), "meaning": in_words(meaning, words)} for kind, meaning in KINDS.items()},
        "by_length": _by_length(facts.get("by_length") or {}, len(facts["records"])),
        **{name: facts.get(name, {}) for name in ("layers", "ablations", "paths", "excerpt", "provenance")},
    }


def _by_length(found: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Lengths, and for each of them the kinds of all heads."""
    kinds = found.get("kinds")
    known = {length: row for length, row in kinds.items() if _is_list(row, heads)} if isinstance(kinds, Mapping) else {}
    lengths = [x for x in found.get("lengths") or [] if str(x) in known] if _is_list(found.get("lengths")) else []
    return {"lengths": lengths, "kinds": [[str(kind) for kind in known[str(x)]] for x in lengths]}


def _is_list(x: Any, length: int | None = None) -> bool:
    return isinstance(x, list) and length in (None, len(x))


def telling_heads(facts: Mapping[str, Any], count: int = 8) -> list[int]:
    """Places in `records` of heads to look at first: one of each advice, then of each kind the one that adds most."""
    records = facts["records"]
    place = {(record["site"], record["head"]): i for i, record in enumerate(records)}
    found = [
        place[tuple(head)] for entry in facts.get("advice", []) for head in entry["heads"][:1] if tuple(head) in place
    ]

    def size(i: int) -> float:
        measures = records[i]["measures"]
        statistic = measures.get("importance") or measures.get("contribution") or {}
        return statistic.get("mean") or 0.0

    for kind in sorted(KINDS, key=lambda kind: kind == "uniform"):  # the least to see comes last
        found += sorted((i for i, record in enumerate(records) if record["kind"] == kind), key=size)[-1:]
    return list(dict.fromkeys(found))[:count]


def _page(facts: dict[str, Any]) -> str:
    model, words, data = facts["model"], page_words(facts), page_data(facts)
    if "plan" in facts:
        data["plan"] = facts["plan"]
    return assembled_page(
        "report.html",
        ("basics.js", "pictures.js", "table.js", "attention.js", "heads.js", "tokens.js", "plan.js", "report.js"),
        data,
        title=model["name"],
        subtitle=f"{model['class']}, {model['parameters']:,} parameters, {len(facts['records'])} heads; {basis(facts)}",
        basis=f"From {basis(facts)}.",
        words=words,
        has_plan="plan" in facts,
        advice=_advice(facts, [site["label"] for site in data["sites"]]),
        unseen=facts.get("unseen", []),
        headline=facts["headline"],
        command=facts["provenance"].get("command"),
        version=facts["provenance"].get("headwise", ""),
    )


def basis(facts: Mapping[str, Any]) -> str:
    """On how many inputs of which lengths: "16 texts of 512 tokens, 2 of them with spectra"."""
    words, inputs = page_words(facts), facts["inputs"]
    low, high, count, spectra = (inputs[name] for name in ("shortest", "longest", "texts", "spectra_texts"))
    length = f"{high}" if low == high else f"{low} to {high}"
    few = "" if spectra == count else f", {spectra or 'none'} of them with spectra"
    return f"{count} {words['item'] if count == 1 else words['items']} of {length} {words['units']}{few}"


def with_code(text: str) -> str:
    """The text as HTML, everything escaped, `words in backticks` as code."""
    parts = [escape(part) for part in str(text).split("`")]
    if len(parts) % 2 == 0:  # a backtick without a partner
        return "`".join(parts)
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _advice(facts: Mapping[str, Any], labels: list[str]) -> list[dict[str, Any]]:
    places = {(record["site"], record["head"]) for record in facts["records"]}
    found = []
    for entry in facts.get("advice", []):
        heads: list[tuple[int, int]] = [tuple(x) for x in entry.get("heads") or [] if tuple(x) in places]
        shown_heads = [
            {"label": f"{labels[site]} · {head}", "address": head_address(labels[site], head)}
            for site, head in heads[:SHOWN_HEADS]
        ]
        found.append(
            {**entry, "text": with_code(entry["text"]), "heads": shown_heads, "more": max(0, len(heads) - SHOWN_HEADS)}
        )
    return found


def _record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record for the page: each statistic as [mean, std, min, max, texts]."""
    left_out = ("by_text", "evidence", "layer")
    return {
        **{name: x for name, x in record.items() if name not in left_out},
        "measures": {
            name: [*(_short(x.get(key)) for key in ("mean", "std", "min", "max")), x["texts"]]
            for name, x in record["measures"].items()
        },
        "profile": [_short(x, 3) for x in _middle(record["profile"], 2 * REACH + 1)],
        "spectrum": [_short(x, 3) for x in record["spectrum"]],
    }


def _middle(x: Sequence[float], count: int) -> Sequence[float]:
    left_out = max(0, len(x) - count) // 2
    return x[left_out : len(x) - left_out]


def _similarity(matrix: Sequence[Sequence[float | None]]) -> str:
    """The cosines below the diagonal, row by row: base64 of a byte each, round(250 cosine), 255 for None."""
    below = (x for i, row in enumerate(matrix) for x in row[:i])
    values = bytes(255 if x is None else round(250 * min(max(x, 0.0), 1.0)) for x in below)
    return base64.b64encode(values).decode()


def _short(x: float | None, digits: int = 4) -> float | None:
    return None if x is None else float(f"{x:.{digits}g}")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(css: str, script: str) -> str:
    """A Content-Security-Policy that allows this style and this script, by their hashes, and nothing else.

    Images may be data: URLs, for the pictures of attention.  No other script runs, no request is made and no form is
    sent, even if a name or a text should find its way into the page as markup.
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
