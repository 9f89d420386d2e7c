"""How much the model's answer changes when one head's output is replaced by its mean over tokens.

    O_i <- mean_i O_i          for one head, over the tokens that are not padding

    importance = mean_i KL(p_i || p_i')              models with logits, in nats: p_i = softmax of the logits of token i
               = mean_i ||a_i - a_i'|| / ||a_i||     other models: a_i the final hidden state of token i

The mean keeps what the head adds to every token alike (a bias that the model may rely on) and removes what differs
between tokens.  Several heads of a layer are replaced in one forward pass: the hidden state before the block is
repeated, each copy has another head replaced, and one copy has none.  So the layers before are computed once.  Where
that is not possible (no list of blocks, or an encoder that feeds a decoder), heads are replaced one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError
from headwise.examination.advice import head_name, with_advice
from headwise.examination.measure.head_measures import MEASURES
from headwise.examination.record import Examination, Record, Statistic, statistic
from headwise.models.intercept import intercept, nothing_seen, read_sdpa
from headwise.models.run import Batch, OwnHook, as_it_was, blocks_of, check_batch, map_batch, run_model
from headwise.operators.masks import Mask
from headwise.progress import Progress, reported

ENTRIES = 1 << 26
"""Numbers of the answer that the copies of one pass may have: 256 MB in float32."""

SAME = 1e-3
"""A copy without a replaced head must agree with the model to this, or copies are not used."""


def with_importance(
    examination: Examination,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    progress: Progress | bool | None = None,
) -> Examination:
    """The examination with the measure `importance` of every head, over the texts of `batches`.

    progress  True for bars on standard error, or a function of (what, done, total), which counts heads times batches
    """
    trial = _Trial(model, [(record.layer, record.head) for record in examination.records])
    done, total = 0, len(examination.records) * len(batches)
    with reported(progress) as report, as_it_was(model), torch.no_grad():

        def advance(heads: int) -> None:
            nonlocal done
            done += heads
            report("replacing each head by its mean", done, total)

        values = torch.cat([trial.changes(batch, advance) for batch in batches], dim=-1)  # (heads, texts)
    records = [_with(record, row.tolist()) for record, row in zip(examination.records, values, strict=True)]
    unit = "nats" if trial.has_logits else "share"
    measure = {**MEASURES["importance"].to_dict(), "unit": unit}
    others = [x for x in examination.measures if x["name"] != "importance"]
    found = replace(examination, records=records, measures=[*others, measure])
    return with_advice(replace(found, headline=[*examination.headline, _sentence(found, values.shape[-1], unit)]))


def _sentence(examination: Examination, texts: int, unit: str) -> str:
    """Which heads the answer depends on most."""
    records = sorted(examination.records, key=lambda record: -record.measures["importance"].mean)

    def change(record: Record) -> str:
        mean = record.measures["importance"].mean
        return f"{mean:.2g} nats" if unit == "nats" else f"{mean:.1%}"

    first = ", ".join(f"{head_name(examination, record)} ({change(record)})" for record in records[:3])
    what = "prediction" if unit == "nats" else "final hidden state"
    return (
        f"Replaced by the mean of its output, a head changes the {what} by {change(records[len(records) // 2])} in the "
        f"median ({'one text' if texts == 1 else f'mean over {texts} texts'}), and most of all {first}."
    )


def _with(record: Record, values: list[float]) -> Record:
    measures: dict[str, Statistic] = {**record.measures, "importance": statistic(values)}
    return replace(
        record, measures=measures, by_text={**record.by_text, "importance": [float(f"{x:.5g}") for x in values]}
    )


@dataclass(frozen=True, eq=False)
class _Reference:
    """What the model does with a batch when nothing is replaced."""

    answer: Tensor  # (texts, ...)
    kept: dict[str, Tensor | None]  # site -> (texts, m), False for padding


class _Trial:
    """A model whose heads are replaced by means, one or several at a time."""

    def __init__(self, model: nn.Module, heads: Sequence[tuple[str, int]]) -> None:
        self.model, self.heads = model, heads
        self.sites = dict.fromkeys(site for site, _ in heads)
        blocks = blocks_of(model)
        names = {site: [b for b in blocks if site == b or site.startswith(b + ".")] for site in self.sites}
        self.blocks = {site: blocks[found[0]] for site, found in names.items() if found}
        self.has_logits = self.tokens_first = False
        self.copies_work = True

    def changes(self, batch: Batch, advance: Callable[[int], None]) -> Tensor:
        """(heads, texts) importance on one batch."""
        check_batch(batch)
        reference = self._reference(batch)
        texts = len(reference.answer)
        rows = _rows(batch, texts) if self.copies_work and self.blocks.keys() == self.sites.keys() else None
        found: dict[tuple[str, int], Tensor] = {}
        alone = [] if rows is None else [reference] if len(rows) == 1 else [self._reference(row) for row in rows]
        for site in self.sites:
            heads = [head for name, head in self.heads if name == site]
            changed = None
            if rows is not None and self.copies_work:
                parts = [self._in_copies(row, x, site, heads) for row, x in zip(rows, alone, strict=True)]
                whole = [part for part in parts if part is not None]
                self.copies_work = len(whole) == len(parts)
                changed = torch.stack(whole, dim=-1) if self.copies_work else None
            if changed is None:
                changed = torch.stack([self._one_by_one(batch, reference, site, head) for head in heads])
            found.update({(site, head): row for head, row in zip(heads, changed, strict=True)})
            advance(len(heads))
        return torch.stack([found[head] for head in self.heads])

    def _reference(self, batch: Batch) -> _Reference:
        kept: dict[str, Tensor | None] = {}
        texts: list[int] = []

        def see(site: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
            call = read_sdpa(*args, **kwargs)
            kept[site] = _real_queries(call.mask)
            texts.append(len(call.q))
            return attention(*args, **kwargs)

        with intercept(self.model, answer=see):
            output = run_model(self.model, batch)
        if not kept:
            raise nothing_seen(self.model)
        missing = [site for site in self.sites if site not in kept]
        if missing:
            raise InputError(
                f"with_importance: {type(self.model).__name__} does not attend at {missing[0]} on this batch; give the "
                "batches that it was examined on"
            )
        answer, self.has_logits = _answer(output)
        # models of torch may take and return (tokens, texts, width)
        self.tokens_first = answer.dim() == 3 and len(answer) != texts[0] == answer.shape[1]
        return _Reference(self._by_text(answer), kept)

    def _by_text(self, answer: Tensor) -> Tensor:
        return answer.transpose(0, 1) if self.tokens_first else answer

    def _one_by_one(self, batch: Batch, reference: _Reference, site: str, head: int) -> Tensor:
        """(texts,) importance of one head."""
        output = self._run(batch, site, lambda out, kept: _mean_of_head(out, head, kept), reference.kept[site])
        both = zip(reference.answer, self._by_text(_answer(output)[0]), strict=True)
        return torch.stack([self._change(a, b, reference, text) for text, (a, b) in enumerate(both)])

    def _in_copies(self, row: Batch, reference: _Reference, site: str, heads: list[int]) -> Tensor | None:
        """(heads,) importance of heads of one site on one text; None if the model does not run on copies."""
        at_once = max(1, min(len(heads), ENTRIES // max(1, reference.answer.numel()) - 1))
        changes: list[Tensor] = []
        for start in range(0, len(heads), at_once):
            part = heads[start : start + at_once]

            def ablate(out: Tensor, kept: Tensor | None, part: list[int] = part) -> Tensor:
                if len(out) != len(part) + 1:
                    raise InputError("with_importance: copies were not kept apart")
                for copy, head in enumerate(part):
                    _mean_of_head(out[copy : copy + 1], head, kept)
                return out

            try:
                with _copies(self.blocks[site], len(part) + 1):
                    answer = _answer(self._run(row, site, ablate, reference.kept[site]))[0]
            except HeadwiseError:
                return None
            if answer.shape != (len(part) + 1, *reference.answer.shape[1:]):
                return None
            # the copy without a replaced head is compared, as rounding depends on the number of copies
            whole = answer[-1]
            if not torch.allclose(whole, reference.answer[0], rtol=SAME, atol=SAME * float(whole.abs().amax())):
                return None
            changes += [self._change(whole, one, reference, 0) for one in answer[:-1]]
        return torch.stack(changes)

    def _run(
        self, batch: Batch, site: str, ablate: Callable[[Tensor, Tensor | None], Tensor], kept: Tensor | None
    ) -> Any:
        def answer(name: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
            out = attention(*args, **kwargs)
            if name != site:
                return out
            four = out.reshape(-1, *out.shape[-3:]).clone()
            return ablate(four, kept).reshape(out.shape)

        with intercept(self.model, answer=answer):
            return run_model(self.model, batch)

    def _change(self, before: Tensor, after: Tensor, reference: _Reference, text: int) -> Tensor:
        """() importance from the answers for one text, over the tokens that are not padding."""
        if before.dim() > 1:
            real = next((x for x in reference.kept.values() if x is not None and x.shape[-1] == len(before)), None)
            if real is not None and text < len(real):
                before, after = before[real[text]], after[real[text]]
            before, after = before.flatten(0, -2), after.flatten(0, -2)
        if self.has_logits and before.shape[-1] > 1:
            return _divergence(before, after)
        moved = torch.linalg.vector_norm((after - before).double(), dim=-1)
        return (moved / torch.linalg.vector_norm(before.double(), dim=-1).clamp(min=1e-30)).mean()


def _divergence(before: Tensor, after: Tensor) -> Tensor:
    """() mean over tokens of KL(softmax(before) || softmax(after)), in float64, some tokens at a time."""
    rows, total = max(1, (1 << 22) // before.shape[-1]), torch.zeros((), dtype=torch.float64, device=before.device)
    before, after = (x.reshape(-1, x.shape[-1]) for x in (before, after))
    for a, b in zip(before.split(rows), after.split(rows), strict=True):
        p, other = a.double().log_softmax(-1), b.double().log_softmax(-1)
        total += (p.exp() * (p - other)).sum(-1).clamp(min=0).sum()
    return total / len(before)


def _mean_of_head(out: Tensor, head: int, kept: Tensor | None) -> Tensor:
    """`out` (texts, h, m, d) with the rows of one head replaced, in place, by their mean over the kept ones."""
    one = out[:, head]
    if kept is None:
        one[:] = one.mean(-2, keepdim=True)
    else:
        weights = kept.to(one.dtype).unsqueeze(-1)
        one[:] = (one * weights).sum(-2, keepdim=True) / weights.sum(-2, keepdim=True).clamp(min=1)
    return out


@contextlib.contextmanager
def _copies(block: nn.Module, count: int) -> Iterator[None]:
    """The hidden state that enters `block`, of one text, is repeated `count` times; so is everything after it."""

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if args and isinstance(args[0], Tensor):
            return (_repeated(args[0], count), *args[1:]), kwargs
        for name in ("hidden_states", "src", "x"):
            if isinstance(kwargs.get(name), Tensor):
                return args, {**kwargs, name: _repeated(kwargs[name], count)}
        raise InputError(f"with_importance: {type(module).__name__} has no hidden state that could be repeated")

    handle = block.register_forward_pre_hook(OwnHook(before), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _repeated(x: Tensor, count: int) -> Tensor:
    if x.dim() != 3 or len(x) != 1:
        raise InputError(f"with_importance: a hidden state of shape {tuple(x.shape)} is not one text")
    return x.expand(count, *x.shape[1:])


def _rows(batch: Batch, texts: int) -> list[Batch] | None:
    """The batch as batches of one text each; None if its tensors have no common first axis of that size."""
    tensors = [x for _, x in check_batch(batch)]
    if any(x.dim() == 0 or len(x) != texts for x in tensors):
        return None
    return [map_batch(lambda x, i=i: x[i : i + 1], batch) for i in range(texts)]


def _real_queries(mask: Mask) -> Tensor | None:
    """(texts, m) False where queries are padding: keys that no query attends to, if queries and keys are the same."""
    if mask.visible is None or mask.m != mask.n:
        return None
    attended = mask.visible.any(dim=-2).any(dim=1)
    return None if bool(attended.all()) else attended


def _answer(output: Any) -> tuple[Tensor, bool]:
    """(what the model answers, whether these are logits); the first axis is that of the texts."""
    if isinstance(output, Tensor):
        return output, False
    for name in ("logits", "last_hidden_state"):
        x = getattr(output, name, None)
        if isinstance(x, Tensor):
            return x, name == "logits"
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x, False
    raise InputError(f"the model returned a {type(output).__name__}, which holds no floating-point tensor to compare")
