"""Fits recover operators that can be recovered, and never make a head worse on held-out texts."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwise.operators.linear.near_far import near_far
from headwise.operators.masks import Mask
from headwise.operators.relative.toeplitz import toeplitz_softmax
from headwise.operators.sparse.window import window
from headwise.operators.uniform import uniform
from headwise.replacement import AttentionSample, Choice, HeadInputs
from headwise.replacement.planning.fit import beats_ablation, errors, fit
from headwise.replacement.standard_kinds import mean_profile

SEED = torch.Generator().manual_seed(0)


def samples(operator, count: int = 4, n: int = 48, width: int = 8, heads: int = 2) -> list[AttentionSample]:
    result = []
    for _ in range(count):
        q, k, v = torch.randn(3, 1, heads, n, width, generator=SEED).unbind(0)
        result.append(AttentionSample(HeadInputs(q, k, Mask(n, n), width**-0.5), v, operator(q, k)(v)))
    return result


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_a_toeplitz_head_is_recovered() -> None:
    logits = -((torch.arange(-47, 48) + 2.0) ** 2) / 8
    heads = samples(lambda q, k: toeplitz_softmax(logits, 48, 48))
    # the scores of such a head are not in q and k: the start is uniform, and the fit has to find the profile
    heads = [replace(x, inputs=replace(x.inputs, q=x.inputs.q * 0, k=x.inputs.k * 0)) for x in heads]
    assert float(mean_profile(heads, 4).sum()) > 0
    choice = Choice("toeplitz", {"reach": 16})
    tensors = fit(choice, heads, length=48, steps=150, generator=generator())
    assert errors(choice, heads, tensors).max() < 0.3 * errors(choice, heads, {"profile": torch.zeros(2, 33)}).min()


def test_features_of_far_keys_are_learned() -> None:
    a, b = torch.randn(2, 2, 1, 8, generator=SEED).unbind(0)
    true = {"a": a, "b": b, "c": torch.zeros(2, 1)}
    heads = samples(lambda q, k: near_far(q, k, **true, block=4, leading=1, scale=8**-0.5))
    choice = Choice("near_far", {"block": 4, "rank": 1, "leading": 1})
    assert errors(choice, heads, true).max() < 1e-8
    initial = fit(choice, heads, length=48, steps=0, generator=generator())
    tensors = fit(choice, heads, length=48, steps=150, generator=generator())
    assert (errors(choice, heads, tensors) < 0.5 * errors(choice, heads, initial)).all()


def test_a_head_keeps_its_initial_tensors_if_they_are_better_on_held_out_texts(monkeypatch) -> None:
    """The first text is held out; the others have random outputs."""
    held_out, others = samples(lambda q, k: uniform(48, 48), 1), samples(lambda q, k: uniform(48, 48), 3)
    others = [replace(x, output=torch.randn(x.output.shape, generator=SEED) * 10) for x in others]
    choice = Choice("toeplitz", {"reach": 4})
    start = {"profile": torch.zeros(2, 9)}
    monkeypatch.setattr("headwise.replacement.planning.fit._initial", lambda *args: start)
    tensors = fit(choice, [*held_out, *others], length=48, steps=60, generator=generator())
    assert (errors(choice, held_out, tensors) <= errors(choice, held_out, start) + 1e-12).all()


def test_a_learned_far_part_must_beat_the_window_and_its_initial_features_on_other_texts() -> None:
    """Head 0 has the far part that was learned, head 1 only a window on the text that judges."""
    a, b = torch.randn(2, 2, 1, 8, generator=SEED).unbind(0)
    true, frozen = {"a": a, "b": b, "c": torch.zeros(2, 1)}, {"a": a * 0, "b": b * 0, "c": torch.zeros(2, 1)}
    choice = Choice("near_far", {"block": 4, "rank": 1, "leading": 1})
    (other,) = samples(lambda q, k: near_far(q, k, **true, block=4, leading=1, scale=8**-0.5), 1)
    near = window(other.inputs.q, other.inputs.k, 9, leading=1, scale=8**-0.5)(other.v)
    output = torch.stack([other.output[:, 0], near[:, 1]], dim=1)
    assert beats_ablation(choice, [replace(other, output=output)], true, frozen).tolist() == [True, False]
    assert beats_ablation(choice, [other], true, true).tolist() == [False, False]  # nothing was learned
    projected = Choice("projected", {"rank": 2})
    tensors = fit(projected, [other], length=48, steps=0, generator=generator())
    assert beats_ablation(projected, [other], tensors, tensors).tolist() == [False, False]
