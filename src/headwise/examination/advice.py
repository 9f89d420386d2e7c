"""What to do about the heads of a model, from an Examination: each piece with its numbers and the heads it speaks of.

    {"topic": "cheap operators", "text": "…", "heads": [[site, head], …], "command": "headwise plan …"}

An examination measures what heads do, not what the model would do without them; so heads are called candidates, and the
command is the one that measures the rest.  Every threshold is a constant here.
"""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headwise.examination.measure.head_kinds import SINK_MASS, low_rank
from headwise.examination.record import Examination, Record
from headwise.models.inputs import TEXT_WORDS

FLOAT16_LIMIT = 65504
BFLOAT16_SCORE = 256
"""From here on bfloat16, with eight significant bits, has even numbers only."""

IDLE_IMPORTANCE = {"share": 0.005, "nats": 0.001}
"""A head that changes the answer by less does nothing measurable."""
IDLE_CONTRIBUTION = 0.05
"""Share of the median contribution of the heads of its layer below which a head adds next to nothing."""
IDLE_SINK, IDLE_SINK_CONTRIBUTION = 0.9, 0.25
"""The same for heads that give at least IDLE_SINK of their attention to one key."""

RESTING = ("induction", "duplicate token")
"""Kinds of heads that rest on a sink where nothing repeats: what they do on other texts is not seen on these."""

DUPLICATE_COSINE = 0.95
COLLAPSED = 0.2
"""Relative residual below which tokens are nearly equal."""

OFFSET_MASS, WINDOW_MASS, TOEPLITZ_ERROR, UNIFORM_ENTROPY, LOW_RANK_ERROR = 0.9, 0.9, 0.2, 0.99, 0.05
"""Evidence for a cheap operator: stricter than for a kind, which says what a head mostly does."""

SAVING = 0.02
"""Share of the multiply-adds of attention below which cheap operators are not worth a sentence."""

Advice = dict[str, Any]


def with_advice(examination: Examination) -> Examination:
    """The examination with the advice that follows from it, the most valuable first."""
    parts = (_unseen, _half_precision, _idle, _cheap, _duplicates, _collapse)
    advice = [piece for part in parts if (piece := part(examination)) is not None]
    return replace(examination, advice=advice or [_nothing(examination)])


def _unseen(x: Examination) -> Advice | None:
    if not x.unseen:
        return None
    names = _listed([f"{part['name'] or 'the model itself'} ({part['class']})" for part in x.unseen])
    was = "was" if len(x.unseen) == 1 else "were"
    text = (
        f"{_count(len(x.unseen), 'module')} that may attend {was} not measured: {names}. Nothing here speaks of "
        f"{'it' if len(x.unseen) == 1 else 'them'}."
    )
    return _piece("not measured", text, [])


def _half_precision(x: Examination) -> Advice | None:
    large = [record for record in x.records if _highest(record, "largest_score") > BFLOAT16_SCORE]
    if not large:
        return None
    large.sort(key=lambda record: -_highest(record, "largest_score"))
    highest = _highest(large[0], "largest_score")
    limit = f"; float16 ends at {FLOAT16_LIMIT}" if highest > FLOAT16_LIMIT / 16 else ""
    error = _bfloat16_error(highest)
    text = (
        f"The largest attention score of {_count(len(large), 'head')} exceeds {BFLOAT16_SCORE} (up to {highest:.0f}; "
        f"{_named(x, large)}). Rounded to bfloat16 such scores are off by up to {error:.0f}, which changes weights by "
        f"a factor of up to e^{error:.0f}{limit}. Keep the scores in float32."
    )
    return _piece("large scores", text, large)


def _idle(x: Examination) -> Advice | None:
    measured = [record for record in x.records if "importance" in record.measures]
    if measured:
        return _unimportant(x, measured)
    found: dict[int, float] = {}
    for site in range(len(x.sites)):
        heads = [i for i, record in enumerate(x.records) if record.site == site]
        sizes = {i: _mean(x.records[i], "contribution") for i in heads}
        median = statistics.median(sizes.values())
        if math.isnan(median) or median == 0 or len(heads) < 3:
            continue
        for i in heads:
            on_sink = _mean(x.records[i], "sink_mass") >= IDLE_SINK
            if x.records[i].kind not in RESTING and sizes[i] <= median * (
                IDLE_SINK_CONTRIBUTION if on_sink else IDLE_CONTRIBUTION
            ):
                found[i] = sizes[i] / median
    if not found:
        return None
    records = [x.records[i] for i in sorted(found, key=lambda i: found[i])]
    text = (
        f"{_count(len(records), 'head')} add{'s' * (len(records) == 1)} at most {max(found.values()):.0%} of what the "
        f"median head of the layer adds to the residual stream on these {_words(x)['items']} ({_named(x, records)}). "
        "Candidates for removal; `--importance` measures how much the answer depends on each head."
    )
    return _piece("idle heads", text, records, _command(x, "examine", "--importance"))


def _unimportant(x: Examination, measured: Sequence[Record]) -> Advice | None:
    unit = next((m["unit"] for m in x.measures if m["name"] == "importance"), "share")
    limit = IDLE_IMPORTANCE.get(unit, IDLE_IMPORTANCE["share"])
    low = sorted((r for r in measured if _highest(r, "importance") < limit), key=lambda r: _mean(r, "importance"))
    idle, resting = ([r for r in low if (r.kind in RESTING) == rests] for rests in (False, True))
    if not idle:
        return None
    those = "that follows" if len(resting) == 1 else "that follow"
    kept = f" Not counted: {_named(x, resting)}, {those} repeated tokens, of which there may be few." if resting else ""
    most = max(_highest(record, "importance") for record in idle)
    change = f"{most:.2g} nats" if unit == "nats" else f"{most:.2%}"
    answer = "prediction" if unit == "nats" else "final hidden state"
    texts, words = idle[0].measures["importance"].texts, _words(x)
    where = f"one {words['item']}" if texts == 1 else f"each of {texts} {words['items']}"
    text = (
        f"{_count(len(idle), 'head')} can each be replaced by a constant: with the mean of its output over "
        f"{words['units']} the {answer} changes by at most {change} on {where} ({_named(x, idle)}). One at a time: "
        f"removed together they may change more.{kept}"
    )
    return _piece("idle heads", text, idle)


def _cheap(x: Examination) -> Advice | None:
    """Heads whose measures say that an operator of little cost does the same, with the largest saving that allows."""
    operators: dict[int, tuple[str, float]] = {}
    for i, record in enumerate(x.records):
        operator = _operator(record, x.sites[record.site])
        if operator is not None:
            operators[i] = operator
    saved = sum(1 - cost for _, cost in operators.values()) / len(x.records)
    if saved < SAVING:
        return None
    counts = Counter(name for name, _ in operators.values())
    each = ", ".join(f"{count} by {name}" for name, count in counts.most_common())
    records = [x.records[i] for i in operators]
    text = (
        f"{len(records)} of {_count(len(x.records), 'head')} look replaceable by cheaper operators: {each}. If all "
        f"were, attention would take about {1 - saved:.0%} of its multiply-adds at {_length(x)}. Candidates: `headwise "
        "plan` fits operators and measures how far the answer drifts, `headwise rewrite` installs them."
    )
    return _piece("cheap operators", text, records, _command(x, "plan", "--length", str(x.inputs["longest"])))


def _operator(record: Record, site: Mapping[str, Any]) -> tuple[str, float] | None:
    """(the operator, its multiply-adds relative to exact attention) that the measures of a head suggest."""
    n = max(1, site["longest"])
    if record.kind in RESTING or site["kind"] == "cross":  # offsets between two sequences say nothing
        return None
    if _mean(record, "entropy_share") >= UNIFORM_ENTROPY and _mean(record, "visible_share") >= UNIFORM_ENTROPY:
        return "an average", 1 / n
    if _mean(record, "best_offset_mass") >= OFFSET_MASS:
        return "one offset", 1 / n
    for width in (16, 64):
        keys, inside = 2 * width + 1, _mean(record, f"mass_within_{width}")
        if 2 * keys > n:
            break
        if inside >= WINDOW_MASS:
            return f"a window of ±{width}", keys / n
        # the first queries have the first key in their window already
        if inside + _mean(record, "first_mass") - (width + 1) / n >= WINDOW_MASS:
            return f"a window of ±{width} and the first key", (keys + 1) / n
    if _mean(record, "toeplitz_error") <= TOEPLITZ_ERROR:
        return "a profile over offsets", math.log2(n) / n
    rank = low_rank(n)
    if _mean(record, f"output_error_{rank}") <= LOW_RANK_ERROR and not site["causal"] and 4 * rank <= n:
        return f"rank {rank}", 2 * rank / n
    return None


def _duplicates(x: Examination) -> Advice | None:
    """Heads of one layer that attend to the same tokens; averages and sinks, which are all alike, do not count."""
    telling = [i for i, record in enumerate(x.records) if _is_telling(record, x.sites[record.site])]
    pairs = []
    for place, i in enumerate(telling):
        for j in telling[place + 1 :]:
            cosine = x.redundancy[i][j] if x.records[i].site == x.records[j].site else None
            if cosine is not None and cosine >= DUPLICATE_COSINE:
                pairs.append((cosine, i, j))
    if not pairs:
        return None
    pairs.sort(reverse=True)
    heads = list(dict.fromkeys(i for _, *both in pairs for i in both))
    shown = [f"{head_name(x, x.records[i])} and {x.records[j].head} ({cosine:.2f})" for cosine, i, j in pairs]
    records = [x.records[i] for i in heads]
    text = (
        f"{_count(len(pairs), 'pair')} of heads of one layer attend to the same {_words(x)['units']}, with a cosine of "
        f"at least {DUPLICATE_COSINE} between their attention weights: {_listed(shown)}. One attention matrix could "
        "serve both; their values may still differ."
    )
    return _piece("duplicate heads", text, records)


def _is_telling(record: Record, site: Mapping[str, Any]) -> bool:
    n = max(1, site["longest"])
    # ||P||_F of an average is 1, or the root of a harmonic number if it is causal
    average = math.sqrt(math.log(n) + 0.577) if site["causal"] else 1.0
    return _mean(record, "frobenius") >= 2 * average and _mean(record, "sink_mass") < SINK_MASS


def _collapse(x: Examination) -> Advice | None:
    """The first layer after which the tokens are nearly equal."""
    residuals, names = x.layers.get("relative_residual", []), x.layers.get("names", [])
    if len(names) != len(residuals):
        return None
    after = [i for i, name in enumerate(names) if not name.endswith(" in")]  # not what a list of blocks is given
    low = [i for i in after if i > 0 and residuals[i] < COLLAPSED]
    if not low or x.inputs["longest"] < 2:  # a single token is equal to itself
        return None
    first = low[0]
    records = [record for record in x.records if x.sites[record.site].get("block") == names[first]]
    text = (
        f"After {names[first]} the {_words(x)['units']} are nearly equal: the relative residual falls from "
        f"{residuals[first - 1]:.2f} to {residuals[first]:.2f}, and is {residuals[-1]:.2f} after the last layer "
        f"(mean over {x.inputs['texts']} {_words(x)['items']}; below {COLLAPSED} in {_count(len(low), 'layer')})."
    )
    return _piece("tokens collapse", text, records)


def _nothing(x: Examination) -> Advice:
    equal = f"{_words(x)['units']} that become equal"
    checked = ["large scores", "idle heads", "cheap operators", "duplicate heads", equal]
    text = f"Nothing stands out on these {_words(x)['items']} of {_length(x)}. Looked for: {', '.join(checked)}."
    return _piece("nothing stands out", text, [])


# ---- words ----


def _piece(topic: str, text: str, records: Iterable[Record], command: str | None = None) -> Advice:
    return {"topic": topic, "text": text, "heads": [[r.site, r.head] for r in records], "command": command}


def _mean(record: Record, measure: str) -> float:
    """NaN, with which every comparison is false, if it was not measured."""
    return record.measures[measure].mean if measure in record.measures else math.nan


def _highest(record: Record, measure: str) -> float:
    return record.measures[measure].max if measure in record.measures else math.nan


def _bfloat16_error(score: float) -> float:
    """Half of the distance between neighbouring bfloat16 numbers near `score`."""
    return 2.0 ** (math.floor(math.log2(score)) - 8)


def head_name(x: Examination, record: Record) -> str:
    """Such as "layer 3 head 5"; the whole name of the site where its number says too little."""
    names = [re.findall(r"\d+", site["name"]) for site in x.sites]
    own = names[record.site]
    unique = len(own) == 1 and names.count(own) == 1
    return f"{'layer ' + own[0] if unique else x.sites[record.site]['name']} head {record.head}"


def _named(x: Examination, records: Sequence[Record]) -> str:
    return _listed([head_name(x, record) for record in records])


def _listed(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _words(x: Examination) -> dict[str, str]:
    return {**TEXT_WORDS, **x.inputs.get("words", {})}


def _length(x: Examination) -> str:
    low, high = x.inputs["shortest"], x.inputs["longest"]
    return (
        f"{high} {_words(x)['unit' if high == 1 else 'units']}"
        if low == high
        else f"{low} to {high} {_words(x)['units']}"
    )


def _command(x: Examination, verb: str, *options: str) -> str | None:
    """`headwise VERB MODEL …` for the model that was examined from the command line; None in Python."""
    words = shlex.split(x.provenance.get("command", ""))
    if words[:2] != ["headwise", "examine"]:
        return None
    model = [word for word in words[2:3] if not word.startswith("-")]
    return shlex.join(["headwise", verb, *model, *options])
