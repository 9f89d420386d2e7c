"""Two models on the same texts: drift, losses, bytes of the cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import headwise
from headwise.replacement import Choice
from headwise.replacement.trials import trial, warnings
from tests.models.tiny_models import ALL
from tests.replacement.install.test_transformers_models import causal_lm, ids
from tests.replacement.plans import plan_for

transformers = pytest.importorskip("transformers")
WINDOW = Choice("window", {"width": 4, "leading": 1})


def test_a_language_model() -> None:
    """The losses are those of torch's cross entropy; the interval is over tokens."""
    torch.manual_seed(0)
    old = causal_lm()
    new = headwise.rewrite(old, plan_for(old, {"input_ids": ids(1, 8)}, [WINDOW], length=64))[0]
    texts = [{"input_ids": ids(1, 40)} for _ in range(3)]
    found = trial(old, new, texts, "prose")
    with torch.no_grad():
        before, after = (
            torch.cat([F.cross_entropy(m(**x).logits[0, :-1], x["input_ids"][0, 1:], reduction="none") for x in texts])
            for m in (old, new)
        )
    change = after - before
    assert (found.kind, found.length, found.measure) == ("prose", 40, "loss")
    assert found.losses == pytest.approx((before.mean().item(), after.mean().item()), rel=1e-5)
    assert found.drift == pytest.approx(abs(change.mean().item()), rel=1e-3)
    assert found.interval == pytest.approx(1.96 * change.std().item() / math.sqrt(3 * 39), rel=1e-3)
    size = 2 * 2 * 2 * 8 * 4  # two layers, keys and values of two heads of width 8
    assert found.cache_bytes == (40 * size, 5 * size)
    assert min(found.seconds) > 0
    assert trial(old, old, texts[:1], "prose").drift == 0


def test_an_encoder() -> None:
    old, _ = ALL["bert"]()
    old.eval()
    batch = {"input_ids": ids(2, 12), "attention_mask": (torch.arange(12) < torch.tensor([[12], [7]])).long()}
    new = headwise.rewrite(old, plan_for(old, batch, [WINDOW]))[0]
    found = trial(old, new, [batch], "prose")
    with torch.no_grad():
        states = [m(**batch).last_hidden_state for m in (old, new)]
    means = [torch.stack([x[0].mean(0), x[1, :7].mean(0)]) for x in states]
    assert found.drift == pytest.approx((1 - F.cosine_similarity(*means)).mean().item(), rel=1e-3)
    assert (found.measure, found.losses, found.cache_bytes) == ("cosine", None, None)


def test_warnings() -> None:
    old = causal_lm()
    one = trial(old, old, [{"input_ids": ids(1, 20)}], "logs")
    fine = replace(one, drift=0.01, interval=0.002, seconds=(2.0, 1.0))
    assert warnings([fine], 0.02) == []
    assert warnings([replace(fine, drift=0.03)], 0.02) == ["logs at 20: drift 0.0300 > tolerance 0.02"]
    assert warnings([replace(fine, drift=0.021)], 0.02)[0].endswith(", within its interval")
    assert warnings([replace(fine, seconds=(1.0, 2.0))], 0.02) == [
        "logs at 20: slower than before, 2.00 s instead of 1.00 s"
    ]
