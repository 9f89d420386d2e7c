"""Fit a replacement to a head: the learned tensors whose output is nearest to the output of the head.

    error_h = sum ||P~ v - P v||^2 / sum ||P v||^2        over recorded calls, for each head h

All heads of a site are fitted together, each to its own error: their tensors are stacked and independent.  A fit starts
from the data where the kind knows how (`Kind.start`), then runs Adam with a decreasing step.  A quarter of the texts is
held out: each head keeps the tensors that are best there, so that it does not overfit the calibration texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.replacement.kinds import AttentionSample, Choice, Tensors


def fit(
    choice: Choice,
    samples: Sequence[AttentionSample],
    *,
    length: int,
    steps: int,
    generator: torch.Generator,
) -> Tensors:
    """Learned tensors of every head, stacked (h, *shape); empty for a kind without any."""
    initial = _initial(choice, samples, length, generator)
    if not initial or not steps:
        return initial
    held_out = max(1, len(samples) // 4) if len(samples) > 1 else 0
    train, judge = samples[held_out:], samples[:held_out] or samples
    tensors = {name: x.detach().clone().requires_grad_() for name, x in initial.items()}
    step_sizes = choice.definition.step_sizes
    adam = torch.optim.Adam([{"params": [x], "lr": step_sizes.get(name, 0.02)} for name, x in tensors.items()])
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
    scale = torch.stack([_squares(sample.output, sample) for sample in train]).mean(0).clamp(min=1e-30)
    best, least = initial, errors(choice, judge, initial)
    for step in range(steps):
        sample = train[step % len(train)]
        with torch.enable_grad():
            adam.zero_grad(set_to_none=True)
            (_squares(_output(choice, sample, tensors) - sample.output, sample) / scale).sum().backward()
        for x in tensors.values():
            if x.grad is not None:
                x.grad.nan_to_num_()
        adam.step()
        schedule.step()
        if step + 1 in (steps // 3, 2 * steps // 3, steps):
            now = {name: x.detach().clone() for name, x in tensors.items()}
            error = errors(choice, judge, now)
            better = error < least  # for each head
            best = {name: torch.where(better.view(-1, *(1,) * (x.dim() - 1)), x, best[name]) for name, x in now.items()}
            least = torch.minimum(error, least)
    return best


def _initial(choice: Choice, samples: Sequence[AttentionSample], length: int, generator: torch.Generator) -> Tensors:
    """Initial values of all heads, stacked: from the samples if the kind has a `start`."""
    _, heads, _, width = samples[0].inputs.q.shape
    tensors = choice.initial(length, width)
    start = choice.definition.start
    if start is not None and tensors:
        return start(choice.options, samples, generator)
    return {name: x.expand(heads, *x.shape).clone() for name, x in tensors.items()}


def errors(choice: Choice, samples: Sequence[AttentionSample], tensors: Tensors) -> Tensor:
    """(h,): the mean relative error of each head over samples, in double precision."""
    relative = []
    with torch.no_grad():
        for sample in samples:
            error = _squares(_output(choice, sample, tensors) - sample.output, sample)
            relative.append((error / _squares(sample.output, sample).clamp(min=1e-30)).nan_to_num(nan=1e6, posinf=1e6))
    return torch.stack([x.double() for x in relative]).mean(0)


def beats_ablation(choice: Choice, samples: Sequence[AttentionSample], tensors: Tensors, frozen: Tensors) -> Tensor:
    """(h,): whether the fitted tensors are nearer to each head than the initial ones, and than the simpler choice."""
    own, initial = (errors(choice, samples, each) for each in (tensors, frozen))
    ablation = choice.definition.ablation
    simpler = initial if ablation is None else errors(ablation(choice.options), samples, {})
    return own < torch.minimum(initial, simpler)


def _output(choice: Choice, sample: AttentionSample, tensors: Tensors) -> Tensor:
    """P~ v for all heads of the site: (b, h, m, d)"""
    return choice.operator(sample.inputs, tensors)(repeat_heads(sample.v, sample.inputs.q, str(choice)))


def _squares(x: Tensor, sample: AttentionSample) -> Tensor:
    """Sum of squares of each head over real queries, which are at the positions of the keys."""
    mask = sample.inputs.mask.key_mask  # (b, 1, n)
    return (x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)).square().sum((0, 2, 3))
