"""Fitted exponents of counted operations, traced memory and time."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.testing.counting import peak_bytes
from headwise.theory.complexity import (
    ARCHITECTURES,
    LENGTHS,
    RECURRENT,
    claimed_growth,
    exponent,
    formed_memory_growth,
    growth,
    memory_growth,
    time_growth,
)


def test_counted_exponents() -> None:
    assert exponent((2, 4, 8, 16), (3, 12, 48, 192)).value == pytest.approx(2)
    assert str(exponent((2, 4, 8, 16), (3, 12, 48, 192))) == "n^2.00 ± 0.00"
    assert str(exponent((2, 4), (3, 12))) == "n^2.00"
    assert growth("softmax", "multiply_adds").value == pytest.approx(2)
    assert 1.2 < growth("strided", "multiply_adds").value < 1.6  # lower-order terms count at these lengths
    assert growth(RECURRENT, "depth").value == pytest.approx(1)
    assert claimed_growth("hashed") == pytest.approx(exponent(LENGTHS, [n * math.log2(n) for n in LENGTHS]).value)


def test_memory_of_exact_attention_depends_on_whether_p_is_formed() -> None:
    assert memory_growth("softmax", (128, 256, 512)).value == pytest.approx(1, abs=0.02)
    assert formed_memory_growth((128, 256, 512)).value == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("name", [*ARCHITECTURES, RECURRENT])
def test_time_can_be_fitted(name: str) -> None:
    found = time_growth(name, (64, 128, 256), rounds=1)
    assert math.isfinite(found.value)
    assert found.points == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_traced_memory_agrees_with_the_allocator(name: str) -> None:
    """The profiler counts every allocation; only scratch within a kernel, which does not grow with n, is missed."""
    from torch.profiler import ProfilerActivity, profile

    def allocated(call) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            call()
        now = peak = 0
        for event in trace.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        return peak

    missed = []
    for n in (2048, 8192):
        operator, v = ARCHITECTURES[name].build(torch.randn(n, 16), torch.randn(n, 16)), torch.randn(n, 16)
        operator(v)
        missed.append(allocated(lambda op=operator, v=v: op(v)) - peak_bytes(lambda op=operator, v=v: op(v)))
    assert 0 <= missed[0] < 2**20
    assert missed[1] <= missed[0] + 2**16
