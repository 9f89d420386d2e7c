"""The kinds of the heads at several lengths: a kind judged on texts of one length need not hold at another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from headwise.errors import InputError
from headwise.examination.examiner import examine
from headwise.examination.measure.token_patterns import TokenNames
from headwise.examination.record import Examination
from headwise.models.run import Batch
from headwise.progress import Progress, reported

JUDGING = "judging kinds at other lengths"


def with_lengths(
    examination: Examination,
    model: nn.Module,
    batches_of: Mapping[int, list[Batch]],
    *,
    token_names: TokenNames | None = None,
    progress: Progress | bool | None = None,
) -> Examination:
    """The examination with `by_length`: the kinds of all its heads on batches_of[length], texts cut to that length.

    The kinds of the examination itself are added under its own length if all of its texts have one.

    token_names  as for `examine`; without it no head can be recognised as one of delimiters
    progress     True for bars on standard error, or a function of (what, done, total)
    """
    kinds: dict[int, list[str]] = {}
    done = 0
    if examination.inputs["shortest"] == examination.inputs["longest"]:
        kinds[examination.inputs["longest"]] = [record.kind for record in examination.records]
    total = sum(map(len, batches_of.values()))
    with reported(progress) as report:
        for length, batches in batches_of.items():
            if length not in kinds:
                before = done

                def advance(what: str, count: int, of: int | None, before: int = before) -> None:
                    report(JUDGING, before + count, total)

                other = examine(model, batches, token_names=token_names, progress=advance)
                _check_same_heads(examination, other, length)
                kinds[length] = [record.kind for record in other.records]
            done += len(batches)
            report(JUDGING, done, total)
    lengths = sorted(kinds)
    by_length = {"lengths": lengths, "kinds": {str(length): kinds[length] for length in lengths}}
    sentence = _sentence([kinds[length] for length in lengths], lengths)
    return replace(examination, by_length=by_length, headline=[*examination.headline, *sentence])


def _check_same_heads(a: Examination, b: Examination, length: int) -> None:
    if [(r.layer, r.head) for r in a.records] != [(r.layer, r.head) for r in b.records]:
        raise InputError(
            f"with_lengths: the model has {len(a.records)} heads in the examination, but {len(b.records)} at length "
            f"{length}, or others; give batches of the same kind"
        )


def _sentence(kinds: Sequence[Sequence[str]], lengths: Sequence[int]) -> list[str]:
    """How many heads change their kind with the length, and the most frequent change."""
    if len(lengths) < 2:
        return []
    heads = list(zip(*kinds, strict=True))
    changing = [head for head in heads if len(set(head)) > 1]
    where = f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]} tokens"
    if not changing:
        return [f"All {len(heads)} heads have the same kind at {where}."]
    (first, last), count = Counter((head[0], head[-1]) for head in changing).most_common(1)[0]
    most = f", most often from {first} to {last} ({count})" if first != last else ""
    return [f"{len(changing)} of {len(heads)} heads change their kind between {where}{most}."]
