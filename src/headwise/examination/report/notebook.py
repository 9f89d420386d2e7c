"""An Examination as a small piece of HTML for a notebook: advice, the map of heads and the heads to look at first.

No script and no style sheet, so that it also shows in notebooks that are not trusted and on pages that render them.
Text takes the colour of the notebook, so that it can be read on light and on dark backgrounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from headwise.examination.record import Examination
from headwise.examination.report.kind_styles import kind_style
from headwise.examination.report.measure_groups import HEADINGS, first_columns
from headwise.examination.report.page import basis, telling_heads, with_code
from headwise.examination.report.site_labels import site_labels

CELL = 22
SHOWN_HEADS = 8


def notebook_html(examination: Examination) -> str:
    """Advice (or the headline), a map of all heads by kind and a table of some, as HTML and SVG without script."""
    facts = examination.to_dict()
    labels = site_labels([site["name"] for site in facts["sites"]])
    model = facts["model"]
    title = f"{model['class']}, {len(facts['records'])} heads; {basis(facts)}"
    parts = [
        f'<div style="font-weight:600;font-size:1.15em">{escape(str(model["name"]))}</div>',
        f'<div style="opacity:.75">{escape(title)}</div>',
        _unseen(facts),
        _advice(facts, labels),
        f'<div style="overflow-x:auto;margin:.6em 0">{_map(facts, labels)}</div>',
        _legend(facts),
        f'<div style="overflow-x:auto;margin:.6em 0">{_table(facts, labels)}</div>',
    ]
    return f'<div style="line-height:1.45;max-width:60em">{"".join(parts)}</div>'


def _unseen(facts: Mapping[str, Any]) -> str:
    unseen = facts["unseen"]
    if not unseen:
        return ""
    names = ", ".join(escape(str(x["name"])) for x in unseen[:6]) + (", …" if len(unseen) > 6 else "")
    return f'<p style="border-left:4px solid #c98a00;padding-left:.6em">Attention that was not measured: {names}</p>'


def _advice(facts: Mapping[str, Any], labels: list[str]) -> str:
    if not facts["advice"]:
        return "".join(f'<p style="margin:.3em 0">{escape(line)}</p>' for line in facts["headline"])
    rows = []
    for entry in facts["advice"]:
        heads = entry.get("heads") or []
        named = ", ".join(f"{labels[site]} · {head}" for site, head in heads[:SHOWN_HEADS])
        more = f" and {len(heads) - SHOWN_HEADS} more" if len(heads) > SHOWN_HEADS else ""
        rows.append(
            f"<li><b>{escape(str(entry['topic']))}</b>: {with_code(entry['text'])}"
            + (f' <span style="opacity:.75">({escape(named + more)})</span>' if named else "")
            + (f"<br><code>{escape(str(entry['command']))}</code>" if entry.get("command") else "")
            + "</li>"
        )
    return f'<ul style="margin:.4em 0;padding-left:1.3em">{"".join(rows)}</ul>'


def _map(facts: Mapping[str, Any], labels: list[str]) -> str:
    """A square for each head, its kind as a colour and a letter; layers down, heads across."""
    left = 10 + round(6.6 * max(map(len, labels)))
    heads = max(site["heads"] for site in facts["sites"])
    width, height = left + heads * CELL + 4, 18 + len(labels) * CELL + 4
    text = 'font-family="sans-serif" font-size="11"'
    drawn = [
        f'<text x="{left + (h + 0.5) * CELL}" y="12" text-anchor="middle" fill="currentColor" {text}>{h}</text>'
        for h in range(heads)
    ]
    drawn += [
        f'<text x="{left - 6}" y="{18 + (s + 0.68) * CELL:.0f}" text-anchor="end" fill="currentColor" {text}>'
        f"{escape(label)}</text>"
        for s, label in enumerate(labels)
    ]
    for record in facts["records"]:
        x, y = left + record["head"] * CELL, 18 + record["site"] * CELL
        style = kind_style(record["kind"])
        hint = f"{labels[record['site']]} · head {record['head']}: {record['kind']}; {record['description']}"
        drawn.append(
            f'<g><title>{escape(hint)}</title><rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="4" '
            f'fill="{style["colour"]}"/><text x="{x + CELL / 2 - 1:.0f}" y="{y + 14}" '
            f'text-anchor="middle" fill="{style["ink"]}" font-weight="600" {text}>'
            f"{escape(style['letter'])}</text></g>"
        )
    return (
        f'<svg role="img" aria-label="Map of heads by kind" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(drawn)}</svg>'
    )


def _legend(facts: Mapping[str, Any]) -> str:
    kinds = Counter(record["kind"] for record in facts["records"])
    entries = []
    for kind, count in kinds.most_common():
        style = kind_style(kind)
        look = f"background:{style['colour']};color:{style['ink']};border-radius:4px;padding:0 .4em;font-weight:600"
        entries.append(
            f'<span style="white-space:nowrap;margin-right:1em"><span style="{look}">{escape(style["letter"])}</span> '
            f"{escape(kind)} {count}</span>"
        )
    return f"<div>{' '.join(entries)}</div>"


def _table(facts: Mapping[str, Any], labels: list[str]) -> str:
    """A few heads: of each advice, and of each kind."""
    units = {measure["name"]: measure.get("unit", "") for measure in facts["measures"]}
    names = {x["name"]: str(HEADINGS.get(x["name"], x["label"])) for x in facts["measures"]}
    columns = [name for name in first_columns(units) if name in facts["records"][0]["measures"]]
    cell, number = (f'style="text-align:{side};padding:.15em .6em;white-space:nowrap"' for side in ("left", "right"))
    head = "".join(
        [f"<th {cell}>{word}</th>" for word in ("head", "kind")]
        + [f"<th {number}>{escape(_with_unit(names[name], units[name]))}</th>" for name in columns]
        + [f"<th {cell}>in words</th>"]
    )
    rows = []
    for i in telling_heads(facts, SHOWN_HEADS):
        record = facts["records"][i]
        kind = ", ".join([record["kind"], *record.get("traits", [])])
        numbers = "".join(
            f"<td {number}>{_number(record['measures'].get(name, {}).get('mean'), units[name])}</td>"
            for name in columns
        )
        rows.append(
            f"<tr><td {cell}>{escape(labels[record['site']])} · {record['head']}</td><td {cell}>{escape(kind)}</td>"
            f"{numbers}<td {cell}>{escape(record['description'])}</td></tr>"
        )
    look = 'style="color:inherit;font-size:.95em;border-collapse:collapse"'
    return f"<table {look}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit and unit != "share" else name


def _number(x: float | None, unit: str) -> str:
    if x is None:
        return "–"
    return f"{100 * x:.3g} %" if unit == "share" else f"{x:.3g}"
