"""Costs by objective, and the number of keys below which a layer stays exact."""

from __future__ import annotations

import pytest
import torch

from headwise.replacement import SOFTMAX, Choice, Plan
from headwise.replacement.install import kept_keys as kept_keys_module
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.planning import timing
from headwise.replacement.planning.capture import AttentionSite
from headwise.replacement.planning.timing import kept_keys, relative_costs, time_plan

WINDOW = Choice("window", {"width": 16, "leading": 4})
SITES = {name: AttentionSite(name, 4, 2, 8, 64, True) for name in ("a", "b")}


def plan(*choices: Choice, length: int = 64) -> Plan:
    facts = {"heads": 4, "key_value_heads": 2, "width": 8, "causal": True}
    return Plan({"sites": {"a": facts, "b": facts}}, length, {"a": list(choices), "b": [SOFTMAX] * 4})


def test_keys_that_the_cache_keeps() -> None:
    costs = relative_costs(SITES, [SOFTMAX, WINDOW], 64, "memory")
    assert costs["a", SOFTMAX] == pytest.approx(1 / 4)  # of four key-value heads
    assert costs["a", WINDOW] == pytest.approx(20 / 64 / 4)
    assert kept_keys(WINDOW, 10) == 10


def test_multiply_adds_are_counted() -> None:
    costs = relative_costs(SITES, [SOFTMAX, WINDOW], 64, "multiply-adds")
    expected = WINDOW.cost(64, 8, True).multiply_adds / SOFTMAX.cost(64, 8, True).multiply_adds
    assert costs["b", WINDOW] / costs["b", SOFTMAX] == pytest.approx(expected)


def test_seconds_of_decoders_are_half_prefill_and_half_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_seconds_alone", lambda choice, *size: 8.0 if choice == SOFTMAX else 2.0)
    monkeypatch.setattr(timing, "_seconds_of_token", lambda choice, *size: 3.0 if choice == SOFTMAX else 1.0)
    for objective, share in (("prefill", 2 / 8), ("decode", 1 / 3), ("seconds", (2 / 8 + 1 / 3) / 2)):
        costs = relative_costs(SITES, [SOFTMAX, WINDOW], 64, objective)
        assert costs["a", SOFTMAX] == pytest.approx(1 / 4)  # of four key-value heads
        assert costs["a", WINDOW] == pytest.approx(share / 4)


def test_a_token_is_timed_with_the_cache_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new query sees what the cache of the choice keeps of 64 keys and of those that came after them."""
    seen: list[int] = []
    attend = kept_keys_module._shared_keys

    def shared_keys(q: torch.Tensor, k: torch.Tensor, *more) -> torch.Tensor:
        seen.append(k.shape[2])
        return attend(q, k, *more)

    monkeypatch.setattr(kept_keys_module, "_shared_keys", shared_keys)
    timing._seconds_of_token.cache_clear()
    assert timing._seconds_of_token(SOFTMAX, 4, 2, 8, 64) > 0
    assert seen == list(range(65, 65 + timing.REPEATS + 1))
    seen.clear()
    assert timing._seconds_of_token(WINDOW, 4, 2, 8, 64) > 0
    assert seen == [20] * (timing.REPEATS + 1)
    seen.clear()
    assert timing._seconds_of_token(WINDOW, 4, 2, 8, 4) > 0  # the original attention, while the window holds all keys
    assert seen == []
    far = Choice("near_far", {"block": 4, "rank": 1})  # has no cache
    costs = relative_costs(SITES, [SOFTMAX, far], 64, "decode")
    assert costs["a", far] == costs["a", SOFTMAX]


def test_a_group_keeps_what_one_of_its_heads_needs() -> None:
    assert timing.kept_share(plan(WINDOW, WINDOW, WINDOW, WINDOW)) == pytest.approx((20 / 64 + 1) / 2)
    assert timing.kept_share(plan(WINDOW, WINDOW, WINDOW, SOFTMAX)) == pytest.approx((20 + 64 + 128) / 256)


def test_layers_are_exact_below_the_length_from_which_they_are_never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(versions: list, heads: int, groups: int, width: int, length: int, causal: bool) -> list[float]:
        assert (heads, groups, width) == (4, 2, 8)
        return [1.0, 2.0 if length == 32 else 0.5][: len(versions)]

    def token(heads: MixedHeads, groups: int, length: int) -> list[float]:
        return [1.0, {32: 0.5, 64: 1.25, 128: 0.75}[length]]

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "_token_seconds", token)
    given = plan(WINDOW, WINDOW, WINDOW, WINDOW, length=128)
    found = time_plan(given, "prefill")
    assert found["exact_below"] == {"a": 33, "b": 0}
    assert found["seconds"]["32"] == {"exact": 2.0, "planned": 2.0}
    assert found["seconds"]["128"] == {"exact": 2.0, "planned": 0.5 + 1.0}
    assert found["token"]["32"] == {"exact": 2.0, "planned": 1.0 + 0.5}
    # the mean of both is 1.25, 0.875 and 0.625
    assert time_plan(given)["exact_below"] == {"a": 33, "b": 0}
    assert time_plan(given, "decode")["exact_below"] == {"a": 65, "b": 0}
    assert time_plan(given, "memory")["exact_below"] == {"a": 128 // 8, "b": 0}
    torch.testing.assert_close(found["cache"], (20 / 128 + 1) / 2)


def test_encoders_have_no_seconds_of_a_token() -> None:
    facts = {"heads": 4, "key_value_heads": 4, "width": 8, "causal": False}
    found = time_plan(Plan({"sites": {"a": facts}}, 32, {"a": [WINDOW] * 4}), "memory")
    assert "token" not in found
    assert found["exact_below"] == {"a": 0}


@pytest.mark.usefixtures("kernels")
def test_layers_of_softmax_heads_are_timed_against_the_function_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels they may be slower on short sequences: then, and for "memory" too, they stay as they were."""

    def seconds(versions: list, heads: int, groups: int, width: int, length: int, causal: bool) -> list[float]:
        assert len(versions) == 2
        return [1.0, 1.5 if length == 32 else 0.5]

    monkeypatch.setattr(timing, "_seconds", seconds)
    monkeypatch.setattr(timing, "_token_seconds", lambda *args: [1.0, 2.0])
    for objective in ("seconds", "decode", "memory"):
        found = time_plan(plan(*[SOFTMAX] * 4, length=512), objective)
        assert found["exact_below"] == {"a": 33, "b": 33}
        assert found["seconds"]["32"] == {"exact": 2.0, "planned": 2.0}
        assert found["seconds"]["512"] == {"exact": 2.0, "planned": 1.0}


def test_other_work_comes_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop of calls alone, all that they read stays in the caches, as in no model."""
    order: list[str] = []
    monkeypatch.setattr(timing, "_other_work", lambda *size: lambda: order.append("other"))

    def call(q: torch.Tensor, *more: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
        order.append("call")
        return q

    timing._seconds([call, call], 4, 2, 8, 16, True)
    assert order == ["other", "call"] * (len(order) // 2)
    order.clear()
    timing._token_seconds(MixedHeads([SOFTMAX] * 4, 8, 200), 2, 16)
    assert len(order) == 2 * (timing.REPEATS + 1)
