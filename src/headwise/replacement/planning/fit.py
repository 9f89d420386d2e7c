"""Fit a replacement to a head: the learned tensors whose output is nearest to the output of the head.

    error_h = sum ||P~ v - P v||^2 / sum ||P v||^2        over recorded calls, for each head h

All heads of a site are fitted together, each to its own error: their tensors are stacked and independent.  A fit starts
from the data where the kind knows how (`Kind.start`), then runs Adam with a decreasing step.  A quarter of the texts is
held out: each head keeps the tensors that are best there, so that it does not overfit the calibration texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headwise.operators._kernels.queries_keys import repeat_heads
from headwise.replacement.kinds import AttentionSample, Choice, Tensors
from headwise.replacement.planning.capture import SiteRecording
from headwise.replacement.planning.saved_progress import PlanProgress, SiteFits

Report = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, how much there is)"""

Fitted = dict[tuple[str, Choice], Tensors]
"""Learned tensors of all heads, stacked (h, *shape), by (site, choice)."""


def fit_sites(
    recordings: Iterable[SiteRecording],
    choices: Sequence[Choice],
    *,
    sites: int,
    length: int,
    steps: int,
    seed: int,
    progress: PlanProgress,
    report: Report,
) -> tuple[Fitted, dict[tuple[str, Choice], Tensor]]:
    """Fit every choice at every site to the first part of its recording; errors (h,) are on the second part."""
    fitted: Fitted = {}
    errors_of: dict[tuple[str, Choice], Tensor] = {}
    done = 0
    for site, samples in recordings:

        def compute(samples: Callable = samples, done: int = done) -> SiteFits:
            calibration, selection = samples()
            fits: SiteFits = {}
            for index, choice in enumerate(choices):
                similar = _similar(choice, fits, length, calibration[0].inputs.q.shape[-1])
                tensors = fit(
                    choice,
                    calibration,
                    length=length,
                    steps=steps if similar is None else steps // 3,
                    generator=torch.Generator().manual_seed(seed),
                    start=similar,
                )
                fits[choice] = (tensors, errors(choice, selection, tensors))
                report("fitting operators to heads", done + index + 1, sites * len(choices))
            return fits

        for choice, (tensors, error) in progress.fits(site, compute).items():
            fitted[site, choice] = tensors
            errors_of[site, choice] = error
        done += len(choices)
    return fitted, errors_of


def transfer(
    recordings: Iterable[SiteRecording],
    fitted: Fitted,
    pairs: Collection[tuple[str, Choice]],
    *,
    length: int,
    steps: int,
    seed: int,
    progress: PlanProgress,
    report: Report,
) -> Fitted:
    """Fine-tune each (site, choice) pair for `steps` steps: the first stage of LoLCATs (Zhang et al. 2024)."""
    result: Fitted = {}
    for site, samples in recordings:
        for choice in sorted((choice for at, choice in pairs if at == site), key=str):

            def compute(choice: Choice = choice, site: str = site, samples: Callable = samples) -> SiteFits:
                (calibration,) = samples()
                generator = torch.Generator().manual_seed(seed)
                start = fitted[site, choice]
                tensors = fit(choice, calibration, length=length, steps=steps, generator=generator, start=start)
                return {choice: (tensors, errors(choice, calibration, tensors))}

            result[site, choice] = progress.fits(f"{site}|{choice}|{steps} more", compute)[choice][0]
            report("training the chosen operators further", len(result), len(pairs))
    return result


def _similar(choice: Choice, fits: SiteFits, length: int, width: int) -> Tensors | None:
    """The tensors of a fitted choice of the same kind and with the same shapes, from which a fit can start."""
    shapes = choice.shapes(length, width)
    same = (c for c in fits if shapes and c.kind == choice.kind and c.shapes(length, width) == shapes)
    return next((fits[c][0] for c in same), None)


def fit(
    choice: Choice,
    samples: Sequence[AttentionSample],
    *,
    length: int,
    steps: int,
    generator: torch.Generator,
    start: Mapping[str, Tensor] | None = None,
) -> Tensors:
    """Learned tensors of every head, stacked (h, *shape); empty for a kind without any.

    start   initial values, such as the tensors of a similar choice (default: from the kind)
    """
    initial = _initial(choice, samples, length, generator) if start is None else dict(start)
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


def _output(choice: Choice, sample: AttentionSample, tensors: Tensors) -> Tensor:
    """P~ v for all heads of the site: (b, h, m, d)"""
    return choice.operator(sample.inputs, tensors)(repeat_heads(sample.v, sample.inputs.q, str(choice)))


def _squares(x: Tensor, sample: AttentionSample) -> Tensor:
    """Sum of squares of each head over real queries, which are at the positions of the keys."""
    mask = sample.inputs.mask.key_mask  # (b, 1, n)
    return (x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)).square().sum((0, 2, 3))
