"""Fit a replacement to a head: the learned tensors that bring its output nearest to what the head gave.

    error_h = sum ||P~ v - P v||^2 / sum ||P v||^2        over calibration texts, for each head h alone

Heads of a site are fitted together, each to its own error: their tensors are stacked and never meet.  Where a good
beginning can be read off the data it is (`begin`); the rest is Adam with a falling step.  A part of the texts is not
descended on: each head keeps what does best there, so that one number a position cannot learn the texts by heart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headwise.operators._kernels.limits import SCORE_ENTRIES
from headwise.replacement.choice import Choice
from headwise.replacement.planning.capture import Attention

Tensors = dict[str, Tensor]

STEP = {"a": 0.1, "b": 0.1, "c": 0.1, "bias": 0.1, "e": 0.001, "f": 0.001, "profile": 0.05}
"""Adam's first step for each learned tensor, in its own units; others take 0.02."""


def fit(
    choice: Choice,
    samples: Sequence[Attention],
    *,
    length: int,
    steps: int,
    generator: torch.Generator,
    start: Mapping[str, Tensor] | None = None,
) -> Tensors:
    """Learned tensors of every head, stacked (h, *shape); empty for a kind that has none.

    start   where to begin instead, such as the tensors of a choice that differs in its width alone
    """
    begun = begin(choice, samples, length=length, generator=generator) if start is None else dict(start)
    if not begun or not steps:
        return begun
    apart = max(1, len(samples) // 4) if len(samples) > 1 else 0
    train, judge = list(samples[apart:]), list(samples[:apart] or samples)
    own = {name: x.detach().clone().requires_grad_() for name, x in begun.items()}
    groups = [{"params": [x], "lr": STEP.get(name, 0.02)} for name, x in own.items()]
    adam = torch.optim.Adam(groups)
    fall = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
    scale = torch.stack([_squares(sample.out, sample) for sample in train]).mean(0).clamp(min=1e-30)
    best, least = begun, errors(choice, judge, begun)
    for step in range(steps):
        sample = train[step % len(train)]
        with torch.enable_grad():
            adam.zero_grad(set_to_none=True)
            (_squares(output(choice, sample, own) - sample.out, sample) / scale).sum().backward()
        for x in own.values():
            if x.grad is not None:
                x.grad.nan_to_num_()
        adam.step()
        fall.step()
        if step + 1 in (steps // 3, 2 * steps // 3, steps):
            now = {name: x.detach().clone() for name, x in own.items()}
            best, least = _better(best, least, now, errors(choice, judge, now))
    return best


def _better(best: Tensors, least: Tensor, now: Tensors, found: Tensor) -> tuple[Tensors, Tensor]:
    """For each head the tensors with the smaller error."""
    wins = found < least
    kept = {name: torch.where(wins.view(-1, *(1,) * (x.dim() - 1)), x, best[name]) for name, x in now.items()}
    return kept, torch.minimum(found, least)


def output(choice: Choice, sample: Attention, own: Mapping[str, Tensor]) -> Tensor:
    """P~ v for all heads of the site: (b, h, m, d)"""
    kind, h = choice.of, sample.q.shape[1]
    P = kind.build(
        choice, sample.q, sample.k, keep=sample.keep, causal=sample.causal, scale=sample.scale, parameters=own
    )
    v = sample.v if sample.v.shape[1] in (1, h) else sample.v.repeat_interleave(h // sample.v.shape[1], dim=1)
    return P(v)


def relative(choice: Choice, sample: Attention, own: Mapping[str, Tensor]) -> Tensor:
    """(h,): the error of each head on one sample"""
    with torch.no_grad():
        found = _squares(output(choice, sample, own) - sample.out, sample)
        return (found / _squares(sample.out, sample).clamp(min=1e-30)).nan_to_num(nan=1e6, posinf=1e6)


def errors(choice: Choice, samples: Sequence[Attention], own: Mapping[str, Tensor]) -> Tensor:
    """(h,): mean errors over samples, in double precision"""
    return torch.stack([relative(choice, sample, own).double() for sample in samples]).mean(0)


def _squares(x: Tensor, sample: Attention) -> Tensor:
    """Sums of squares for each head, over real queries."""
    x = x if sample.real is None else x.masked_fill(~sample.real, 0)
    return x.square().sum((0, 2, 3))


def begin(choice: Choice, samples: Sequence[Attention], *, length: int, generator: torch.Generator) -> Tensors:
    """Where a fit begins: read off the data where there is a way, else as the kind begins by itself."""
    width, heads = samples[0].q.shape[-1], samples[0].q.shape[1]
    own = choice.of.initial(choice, length, width)
    stacked = {name: x.expand(heads, *x.shape).clone() for name, x in own.items()}
    beginning = BEGIN.get(choice.kind)
    return stacked if beginning is None or not stacked else beginning(choice, samples, stacked, generator)


def _near_far(choice: Choice, samples: Sequence[Attention], own: Tensors, generator: torch.Generator) -> Tensors:
    """Features around queries that occurred: the key side is the query itself, so that a slot holds what it would see.

    With b = u and a = u / 2, feature u weighs most for queries near u: exp(s (q . u - |u|^2 / 2)) exp(s u . k) / e.
    """
    rank = int(choice.options["rank"])
    scale, queries = samples[0].scale, torch.cat([_flat(sample) for sample in samples], dim=1)  # (h, rows, k)
    if rank == 1:
        u = queries.mean(1, keepdim=True)
        return {"a": u / 2, "b": u, "c": torch.full(u.shape[:2], -1.0)}
    pick = torch.randint(queries.shape[1], (rank,), generator=generator)
    u = queries[:, pick]
    return {"a": u / 2, "b": u, "c": -scale * u.square().sum(-1) / 2 - 1}


def _toeplitz(choice: Choice, samples: Sequence[Attention], own: Tensors, generator: torch.Generator) -> Tensors:
    """The logarithm of the mean weight at each offset; beyond the reach, the mean of what lies there."""
    reach = int(choice.options["reach"])
    means = profile(samples, reach)
    return {"profile": means.clamp(min=1e-9).log().float()}


def _quadratic(choice: Choice, samples: Sequence[Attention], own: Tensors, generator: torch.Generator) -> Tensors:
    """Mean and spread of the offsets that a head looks at, each bounded so that a shapeless head has some beginning."""
    reach = min(64, samples[0].k.shape[-2] - 1)
    weights = profile(samples, reach)[:, 1:-1]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    offsets = torch.arange(-reach + 1, reach, dtype=weights.dtype)
    centre = (weights * offsets).sum(-1)
    spread = (weights * (offsets - centre.unsqueeze(-1)).square()).sum(-1).clamp(min=0.05)
    return {"centre": centre.float(), "log_width": spread.log().float() / 2}


def profile(samples: Sequence[Attention], reach: int) -> Tensor:
    """Mean of P_(i, i+o) over i for o = -reach..reach, (h, 2 reach + 1); the two ends hold the mean of all beyond."""
    total, count = torch.zeros(samples[0].q.shape[1], 2 * reach + 1), torch.zeros(2 * reach + 1)
    for sample in samples:
        h, n = sample.q.shape[1], sample.k.shape[-2]
        keys = sample.k if sample.k.shape[1] == h else sample.k.repeat_interleave(h // sample.k.shape[1], dim=1)
        block = max(1, SCORE_ENTRIES // (h * n))
        for b in range(sample.q.shape[0]):
            for start in range(0, n, block):
                stop = min(n, start + block)
                scores = sample.scale * (sample.q[b, :, start:stop] @ keys[b].mT)
                offset = torch.arange(n) - torch.arange(start, stop)[:, None]
                hidden = offset > 0 if sample.causal else torch.zeros_like(offset, dtype=torch.bool)
                hidden = hidden if sample.keep is None else hidden | ~sample.keep[b]
                place = (offset.clamp(-reach, reach) + reach).flatten()
                p = torch.softmax(scores.masked_fill(hidden, -1e30), dim=-1).masked_fill(hidden, 0)
                total.index_add_(1, place, p.flatten(1))
                count.index_add_(0, place, (~hidden).float().flatten())
    return total / count.clamp(min=1)


def _flat(sample: Attention) -> Tensor:
    """Real queries of all sequences: (h, rows, k)"""
    q = sample.q.transpose(0, 1)
    return q.flatten(1, 2) if sample.keep is None else q[:, sample.keep]


BEGIN: dict[str, Callable[[Choice, Sequence[Attention], Tensors, torch.Generator], Tensors]] = {
    "near_far": _near_far,
    "toeplitz": _toeplitz,
    "quadratic": _quadratic,
}
