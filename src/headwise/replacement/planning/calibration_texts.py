"""Texts of several kinds, by which a plan is chosen and measured unless the user gives some.

| kind | what it is | licence |
|---|---|---|
| prose | an excerpt of Moby-Dick, shipped | public domain |
| code | Python's own library, as it is installed: argparse, tarfile | PSF |
| manual | the language reference in Python's help, as it is installed | PSF |
| languages | Kafka, Perrault, Cervantes, Collodi and Caesar in their languages, shipped | public domain |
| records | log lines, JSON and tables, made here | that of headwise |
| numbers | measurements of ten stations as comma-separated values, made here | that of headwise |
| markup | style sheets, lists of links, forms and tables in HTML, made here | that of headwise |
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import InputError
from headwise.models import gate
from headwise.models.inputs import (
    SAMPLE_TEXT,
    check_takes,
    max_positions,
    read_text,
    special_tokens,
    tokenizer_of,
    with_decoder,
)
from headwise.models.load import LoadedModel
from headwise.models.run import as_it_was
from headwise.replacement.planning.capture import find_sites

SHORTEST = 4
"""Tokens of a text."""

FEWEST = 2
"""Texts of a kind: one to choose, one to measure."""

SPACING = 0.8
"""Neighbouring pieces of one source share at most a fifth."""

PARTS = 5
"""Kinds that one file is cut into."""


def calibration_texts() -> dict[str, str]:
    """{kind: text}; those of Python's library are left out where it is installed without sources."""
    texts = {
        "prose": SAMPLE_TEXT.read_text(),
        "languages": SAMPLE_TEXT.with_name("languages.txt").read_text(),
        "records": records(1600),
        "numbers": numbers(3000),
        "markup": markup(260),
    }
    library = Path(sysconfig.get_path("stdlib"))
    try:
        texts["code"] = "\n\n".join((library / name).read_text() for name in ("argparse.py", "tarfile.py"))
        from pydoc_data.topics import topics

        texts["manual"] = "\n\n".join(topics.values())
    except (OSError, ImportError):
        pass
    return texts


def read_kinds(files: Sequence[Path]) -> dict[str, str]:
    """{name of the file: its text}; a single file is cut into parts, because a bound needs several kinds."""
    texts = {str(file): read_text(file) for file in files}
    short = {name: Path(name).name for name in texts}
    if len(set(short.values())) == len(short):
        texts = {short[name]: text for name, text in texts.items()}
    if len(texts) > 1:
        return texts
    ((name, text),) = texts.items()
    size = -(-len(text) // PARTS)
    return {f"{name}, part {i + 1}": text[i * size : (i + 1) * size] for i in range(PARTS)}


def records(count: int, seed: int = 0) -> str:
    """`count` lines of a log, JSON objects and rows of a table, in turns of 40; names come back far apart."""
    rng, lines = random.Random(seed), []
    users = [f"{a}{b}{rng.randrange(100)}" for a in ("ann", "bo", "kim", "lee", "max") for b in ("", "_x", "er", "ina")]
    paths = [f"/{a}/{b}" for a in ("api", "static", "admin") for b in ("items", "login", "reports.csv", "health")]
    states = {user: rng.randrange(1 << 32) for user in users}
    for i in range(count):
        user, path, size = rng.choice(users), rng.choice(paths), rng.randrange(90_000)
        when = f"2024-03-{1 + i // 800:02}T{i // 40 % 24:02}:{i % 60:02}:{rng.randrange(60):02}"
        row = {"time": when, "user": user, "session": f"{states[user]:08x}", "path": path, "bytes": size}
        if i // 40 % 3 == 0:
            level = rng.choice(("INFO", "INFO", "WARNING", "ERROR"))
            lines.append(
                f"{when} {level:7} server[{rng.randrange(4)}]: {user} session={row['session']} GET {path} {size}B"
            )
        else:
            lines.append(json.dumps(row) if i // 40 % 3 == 1 else "| " + " | ".join(map(str, row.values())) + " |")
    return "\n".join(lines)


def numbers(count: int, seed: int = 0) -> str:
    """`count` lines of comma-separated values: hour, station, and four values that wander."""
    rng, lines = random.Random(seed), ["time,station,temperature,pressure,humidity,wind"]
    ranges = ((-20.0, 40.0), (970.0, 1040.0), (5.0, 100.0), (0.0, 30.0))
    stations = {f"ST-{rng.randrange(100, 1000)}": [rng.uniform(*bounds) for bounds in ranges] for _ in range(10)}
    for i in range(count):
        name, values = list(stations.items())[i % 10]
        for j, (low, high) in enumerate(ranges):
            values[j] = min(high, max(low, values[j] + rng.gauss(0, (high - low) / 50)))
        hour = i // 10
        when = f"2023-{1 + hour // 24 // 28 % 12:02}-{1 + hour // 24 % 28:02} {hour % 24:02}:00"
        lines.append(",".join([when, name, *(f"{value:.1f}" for value in values)]))
    return "\n".join(lines)


def markup(count: int, seed: int = 0) -> str:
    """`count` parts of pages in HTML, in turns: rules of a style sheet, lists of links, forms and tables."""
    rng, parts = random.Random(seed), []
    words = (
        "account",
        "archive",
        "basket",
        "contact",
        "delivery",
        "garden",
        "history",
        "invoice",
        "kitchen",
        "library",
    )
    words += ("map", "news", "order", "price", "quality", "result", "search", "ticket", "travel", "weather")
    units, tags = ("px", "em", "%", "vh"), ("div", "section", "article", "nav", "main", "aside")

    def name() -> str:
        return "-".join(rng.sample(words, rng.choice((1, 2, 2))))

    for i in range(count):
        tag, label = rng.choice(tags), name()
        if i % 4 == 0:
            rules = [
                f".{name()} > {rng.choice(tags)}:nth-child({rng.randrange(1, 9)}) {{ margin: {rng.randrange(40)}"
                f"{rng.choice(units)} auto; color: #{rng.randrange(1 << 24):06x}; "
                f"font-size: {rng.randrange(8, 40) / 10}em; }}"
                for _ in range(rng.randrange(2, 6))
            ]
            parts.append("<style>\n  " + "\n  ".join(rules) + "\n</style>")
        elif i % 4 == 1:
            links = [
                f'    <li><a href="/{name()}/{rng.randrange(900)}?page={rng.randrange(20)}" class="{name()}">'
                f"{rng.choice(words).title()} {rng.choice(words)}</a></li>"
                for _ in range(rng.randrange(3, 9))
            ]
            parts.append(f'<{tag} id="{label}">\n  <ul>\n' + "\n".join(links) + f"\n  </ul>\n</{tag}>")
        elif i % 4 == 2:
            fields = [
                f'  <label for="{each}">{each.replace("-", " ").title()}</label>\n  <input id="{each}" name="{each}" '
                f'type="{rng.choice(("text", "email", "number", "checkbox"))}" value="{rng.randrange(100)}" required/>'
                for each in (name() for _ in range(rng.randrange(2, 6)))
            ]
            parts.append(f'<form action="/{label}" method="post">\n' + "\n".join(fields) + "\n</form>")
        else:
            rows = [
                f"  <tr><th>{rng.choice(words).title()}</th><td>{rng.randrange(10_000) / 100}</td>"
                f"<td>{rng.choice(words)} &amp; {rng.choice(words)}</td></tr>"
                for _ in range(rng.randrange(3, 9))
            ]
            parts.append(f'<table class="{label}">\n' + "\n".join(rows) + "\n</table>")
    return "\n".join(parts)


def model_is_causal(model: nn.Module) -> bool:
    """Whether all attention of a model of tokens is causal, from a run on a few of them."""
    device = next((x.device for x in model.parameters()), None)
    batch = with_decoder(model, {"input_ids": torch.ones(1, 8, dtype=torch.long, device=device)})
    with as_it_was(model):
        return all(site.causal for site in find_sites(model, batch).values())


def plan_lengths(model: nn.Module, length: int) -> tuple[int, ...]:
    """Lengths of the texts for a plan up to `length`: the beginnings of a text of a causal model are texts too."""
    shorter = () if model_is_causal(model) else (n for n in (length // 4, length // 2) if n >= 16)
    return (*shorter, length)


def texts_per_kind(model: nn.Module, length: int) -> int:
    """A quarter of them choose; the predictions of a language model for one text are thousands of answers."""
    if model_is_causal(model):
        return 3 if length <= 4096 else 2
    return 24


def piece_starts(tokens: int, size: int, texts: int) -> list[int]:
    """Where up to `texts` pieces of `size` begin in a source of `tokens`, evenly spread."""
    pieces = min(texts, 1 + int((tokens - size) / (SPACING * size)))
    return [i * (tokens - size) // max(1, pieces - 1) for i in range(pieces)]


def texts_by_kind(
    loaded: LoadedModel, sources: Mapping[str, str], lengths: Sequence[int], *, texts: int
) -> dict[str, list[Any]]:
    """{kind: batches of one text}: `texts` pieces of each length, spread evenly over each source.

    A source that is too short for that gives fewer of them, at least two; and one that is too short for two, two pieces
    that are as long as they can be.
    """
    check_takes(loaded, "text")
    tokenizer = tokenizer_of(loaded)
    before, after = special_tokens(tokenizer)
    special, limit = len(before) + len(after), max_positions(loaded.model)
    if limit is not None and max(lengths) > limit:
        raise InputError(f"{loaded.name} has {limit} positions, but --length is {max(lengths)}; use at most {limit}")
    if min(lengths) - special < SHORTEST:
        raise InputError(f"--length {min(lengths)} leaves less than {SHORTEST} tokens beside {special} special ones")
    kinds: dict[str, list[Any]] = {}
    for kind, content in sources.items():
        with gate.failures(f"the tokenizer of {loaded.name} cannot read the text {kind}"):
            ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
        fewest = min(texts, FEWEST)
        if len(ids) < fewest * SHORTEST:
            raise InputError(f"{kind}: {len(ids)} tokens cannot be cut into {fewest} pieces of at least {SHORTEST}")
        for length in lengths:
            size = min(length - special, int(len(ids) / (1 + SPACING * (fewest - 1))))
            if length != lengths[0] and size < length - special:
                continue  # its pieces are those of a smaller length, or of the smallest
            starts = piece_starts(len(ids), size, texts)
            rows = [torch.tensor([[*before, *ids[start : start + size], *after]]) for start in starts]
            kinds.setdefault(kind, []).extend(with_decoder(loaded.model, {"input_ids": row}) for row in rows)
    return kinds
