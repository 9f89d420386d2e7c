"""Fits recover what is there to be recovered, and never make a head worse on texts set aside."""

from __future__ import annotations

import torch

from headwise.operators.linear.near_far import near_far
from headwise.operators.relative.toeplitz import toeplitz_softmax
from headwise.replacement import Choice
from headwise.replacement.planning.capture import Attention
from headwise.replacement.planning.fit import errors, fit, profile

SEED = torch.Generator().manual_seed(0)


def samples(operator, count: int = 4, n: int = 48, width: int = 8, heads: int = 2) -> list[Attention]:
    found = []
    for _ in range(count):
        q, k, v = torch.randn(3, 1, heads, n, width, generator=SEED).unbind(0)
        found.append(Attention(q, k, v, None, False, width**-0.5, operator(q, k)(v)))
    return found


def test_a_positional_head_is_read_off() -> None:
    logits = -((torch.arange(-47, 48) + 2.0) ** 2) / 8
    heads = samples(lambda q, k: toeplitz_softmax(logits, 48, 48))
    # the scores of such a head are not in q and k, so its profile is taken from what P would be
    bare = [Attention(x.q * 0, x.k * 0, x.v, None, False, x.scale, x.out) for x in heads]
    choice = Choice("toeplitz", {"reach": 16})
    assert float(profile(bare, 4).sum()) > 0
    own = fit(choice, bare, length=48, steps=150, generator=torch.Generator().manual_seed(1))
    assert errors(choice, bare, own).max() < 0.3 * errors(choice, bare, {"profile": torch.zeros(2, 33)}).min()


def test_far_features_are_learned() -> None:
    a, b = torch.randn(2, 2, 1, 8, generator=SEED).unbind(0)
    true = {"a": a, "b": b, "c": torch.zeros(2, 1)}
    heads = samples(lambda q, k: near_far(q, k, **true, block=4, first=1, scale=8**-0.5))
    choice = Choice("near_far", {"block": 4, "rank": 1, "first": 1})
    assert errors(choice, heads, true).max() < 1e-8
    begun = fit(choice, heads, length=48, steps=0, generator=torch.Generator().manual_seed(1))
    own = fit(choice, heads, length=48, steps=150, generator=torch.Generator().manual_seed(1))
    assert (errors(choice, heads, own) < 0.5 * errors(choice, heads, begun)).all()


def test_a_head_keeps_its_beginning_if_that_does_better_on_texts_set_aside() -> None:
    """The last texts pull away from the first; what is kept is judged by the first."""
    from headwise.operators.uniform import uniform

    even, odd = samples(lambda q, k: uniform(48, 48), 1), samples(lambda q, k: uniform(48, 48), 3)
    odd = [Attention(x.q, x.k, x.v, None, False, x.scale, torch.randn(x.out.shape, generator=SEED) * 10) for x in odd]
    choice = Choice("toeplitz", {"reach": 4})
    start = {"profile": torch.zeros(2, 9)}
    own = fit(choice, [*even, *odd], length=48, steps=60, generator=torch.Generator().manual_seed(1), start=start)
    assert (errors(choice, even, own) <= errors(choice, even, start) + 1e-12).all()
