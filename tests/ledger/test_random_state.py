"""No check, demonstration or benchmark of ours changes the global random state of the caller."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headwise.bench import worker
from headwise.bench.peers import compare_layers
from headwise.cli.tour_command import check_symmetries, measure_operators
from headwise.growth.demo import lookup, train_and_grow
from headwise.ledger import audit
from headwise.ledger.verification import CLAIMS, verify
from headwise.models import adopt
from headwise.nn import MultiHead
from headwise.random_state import kept_random_state, seeded


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def assert_keeps_random_state(work: Callable[[], Any]) -> None:
    for draw in (lambda: torch.rand(3), random.random, np.random.rand):
        draw()  # somewhere in the middle of a sequence
    before = random_states()
    work()
    assert random_states() == before


@pytest.mark.parametrize("source", ["S0", "S1", "S2", "S3", "S4"])
@pytest.mark.slow
def test_no_claim_reseeds(source: str) -> None:
    for entry in CLAIMS:
        if entry.source == source:
            assert_keeps_random_state(lambda entry=entry: verify(claim=entry.id, timing=True))


QUICK = ("S1.bias", "S3.equivariant", "S3.invariant", "S3.translation", "S3.outputs", "S3.grids")


@pytest.mark.parametrize("claim", QUICK)
def test_a_claim_does_not_reseed_and_does_not_depend_on_the_state(claim: str) -> None:
    (entry,) = (entry for entry in CLAIMS if entry.id == claim)
    assert_keeps_random_state(entry.check)
    first = entry.check().to_json()
    torch.manual_seed(1234)
    assert entry.check().to_json() == first


WORK: dict[str, Callable[[], Any]] = {
    "growth demo": lambda: list(train_and_grow(lookup(8, 4, 4, 2), steps=6, every=3, observe=2, batch=4)),
    "tour": lambda: (measure_operators(4), check_symmetries(4)),
    "worker": lambda: worker.times([{"name": "recurrent", "n": 16}, {"name": "window 128", "n": 256}], rounds=1),
    "peers": lambda: compare_layers(128, names=["softmax"], rounds=1, seconds=1),
    "from torch": lambda: MultiHead.from_torch(nn_attention()),
    "to torch": lambda: multihead().to_torch(),
    "adopt": lambda: adopt(layer()),
    "audit": lambda: audit.audit_weights(multihead(), tokens=6),
}


def multihead() -> MultiHead:
    with seeded(0):
        return MultiHead(8, 2)


def nn_attention() -> nn.MultiheadAttention:
    with seeded(0):
        return nn.MultiheadAttention(8, 2)


def layer() -> nn.Module:
    with seeded(0):
        return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)


@pytest.mark.parametrize("name", WORK)
def test_nothing_else_does_either(name: str) -> None:
    assert_keeps_random_state(WORK[name])


def test_a_seed_gives_the_same_numbers_and_an_error_restores_too() -> None:
    def fail() -> None:
        with kept_random_state():
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            raise KeyboardInterrupt

    before = random_states()
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert random_states() == before
    drawn = []
    for _ in range(2):
        with seeded(3):
            drawn.append(torch.rand(4))
    assert torch.equal(*drawn)
    assert random_states() == before
