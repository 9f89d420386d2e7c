"""Growth on numbers that are not finite: refused with a reason, and the model and the optimizer stay as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, NonFiniteError
from headwise.growth import Grower
from headwise.growth.demo import Reader
from headwise.growth.problem import Factors, Problem
from headwise.growth.solve import WeightPath
from tests.growth.test_grower import (
    HEAD,
    HELD,
    OPTIMIZERS,
    PROBE,
    TASK,
    assert_untouched,
    generator,
    observed,
    snapshot,
)
from tests.growth.test_grower import started as started_reader


def started(make: Callable[..., torch.optim.Optimizer] | None = None) -> tuple[Reader, torch.optim.Optimizer]:
    return started_reader(make, steps=8)


def fixed(value: float) -> Callable[[], float]:
    return lambda: value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("heads", ["auto", [HEAD]])
def test_a_held_out_loss_that_is_not_finite(value: float, heads: Any) -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteError, match=r"held-out loss is not finite before growth.*not empty"):
        grower.grow(p=1, heads=heads, loss=fixed(value))
    assert_untouched(model, optimizer, before)
    with pytest.raises(NonFiniteError, match="before shrinking"):
        grower.shrink(1, [HEAD], loss=fixed(value))
    assert_untouched(model, optimizer, before)


def test_empty_held_out_data() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteError, match="not empty"):
        grower.grow(p=1, heads=[HEAD], loss=lambda: torch.tensor([]).mean())
    assert_untouched(model, optimizer, before)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_loss_that_is_finite_only_before(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Every step of every solution overflows; named heads are then not grown either."""
    model, optimizer = started(make)
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)

    def loss() -> float:
        return 1.0 if model.blocks[0].attend.key_widths == (2, 2) else math.nan

    event = grower.grow(loss=loss)
    assert not event.changes
    assert event.reason in (
        "the held-out loss is not finite at any step",
        "no head has a direction that two halves of the data agree on",
    )
    with pytest.raises(NonFiniteError, match=r"held-out loss is 1 and not finite at any step.*nothing was changed"):
        grower.grow(p=1, heads=[HEAD], loss=loss)
    with pytest.raises(NonFiniteError, match="not finite at any step"):
        grower.grow(p=1, heads=[HEAD], loss=loss, solutions=["gram"])
    assert_untouched(model, optimizer, before)


def test_a_loss_that_is_finite_only_before_shrinking() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    losses = iter([1.0, math.nan])
    with pytest.raises(NonFiniteError, match="after shrinking"):
        grower.shrink(1, [HEAD], loss=lambda: next(losses))
    assert_untouched(model, optimizer, before)
    assert grower.shrink(1, [HEAD]).changes  # the statistics are still there


def test_an_interrupt_while_the_loss_is_measured() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)

    def interrupted(after: int) -> Callable[[], float]:
        calls = iter([1.0] * after)

        def loss() -> float:
            value = next(calls, None)
            if value is None:
                raise KeyboardInterrupt
            return value

        return loss

    for after in (0, 1, 5):
        with pytest.raises(KeyboardInterrupt):
            grower.grow(p=1, heads=[HEAD], loss=interrupted(after))
        assert_untouched(model, optimizer, before)
    with pytest.raises(KeyboardInterrupt):
        grower.shrink(1, [HEAD], loss=interrupted(1))
    assert_untouched(model, optimizer, before)


@pytest.mark.parametrize("value", [None, torch.ones(3), "0.3", 1j])
def test_a_loss_that_is_no_number(value: Any) -> None:
    model, optimizer = started()
    grower = observed(model, optimizer, batches=2)
    with pytest.raises(InputError, match="loss must return one real number, but returned a"):
        grower.grow(p=1, heads=[HEAD], loss=lambda: value)


@pytest.mark.parametrize("part", ["query", "key"])
def test_weights_that_are_not_finite(part: str) -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    with torch.no_grad():
        getattr(model.blocks[0].attend, part).weight[0, 0] = math.inf
    before = snapshot(model, optimizer)
    for work in (grower.scores, grower.grow, lambda: grower.grow(p=1, heads=[HEAD]), lambda: grower.shrink(1, [HEAD])):
        with pytest.raises(NonFiniteError, match="query or key weights of a head have non-finite entries"):
            work()
    assert_untouched(model, optimizer, before)


def test_a_solution_that_is_not_finite() -> None:
    def broken(problem: Problem, p: int) -> WeightPath:
        wide = torch.full((1, len(problem.present.wq[0]), p), math.nan, dtype=torch.float64)
        grown = problem.present.double().beside(Factors(wide, torch.ones(len(problem.present.wk), p).double()))
        return WeightPath(lambda eta: grown, lambda eta: grown, 1.0)

    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(NonFiniteError, match=r"broken has non-finite weights for head 1 of blocks.0.attend"):
        grower.grow(p=1, heads=[HEAD], solutions=[broken])
    with pytest.raises(NonFiniteError, match="not finite at any step of broken"):
        grower.grow(p=1, heads=[HEAD], solutions=[broken], loss=lambda: model.loss(*HELD))
    assert_untouched(model, optimizer, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite_are_not_added(bad: float) -> None:
    """A masked value may leave the loss and its gradient finite, but not the statistics."""
    model, optimizer = started()
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, 4] = False
    attend = model.blocks[0].attend
    attend.value.register_forward_hook(lambda module, args, out: out.masked_fill(~keep.unsqueeze(-1), bad))
    grower = Grower(model, optimizer)
    attend(torch.randn(2, 5, 16), key_mask=keep)[:, :4].square().sum().backward()
    with pytest.raises(NonFiniteError, match=r"non-finite of \d+ entries; nothing was added"):
        grower.observe()
    assert grower.statistics[HEAD[0]].batches == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_loss_scale_that_is_no_scale(scale: float) -> None:
    model, optimizer = started()
    grower = Grower(model, optimizer)
    model.loss(*PROBE).backward()
    with pytest.raises(InputError, match=r"scale must be a positive number, but is .*nothing was added"):
        grower.observe(scale=scale)
    assert grower.statistics[HEAD[0]].batches == 0


def test_statistics_that_overflow() -> None:
    model, optimizer = started()
    model.bfloat16()
    grower = Grower(model, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    with torch.no_grad():
        model.blocks[0].attend.key.weight.zero_()
    x = torch.full((2, 5, 16), 1e19, dtype=torch.bfloat16)
    (model.blocks[0].attend(x) * 1e-19).sum().backward()
    before = snapshot(model, optimizer)
    grower.observe()
    with pytest.raises(NonFiniteError, match=r"statistics of blocks.0.attend overflowed.*call reset"):
        grower.grow(p=1, heads=[HEAD])
    assert_untouched(model, optimizer, before)


def test_a_skipped_step_of_a_gradient_scaler_is_not_observed() -> None:
    """float16 gradients overflow under a large loss scale: observe refuses, the scaler skips, and training goes on."""
    model, optimizer = started()
    grower, draws = Grower(model, optimizer), generator(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-10)
    refused = 0
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(TASK.draw(8, draws)[0])
        scaler.scale(logits.half().square().mean()).backward()
        try:
            grower.observe(scale=scaler.get_scale())
        except NonFiniteError:
            refused += 1
        scaler.step(optimizer)
        scaler.update()
    assert 0 < refused < 4
    assert grower.statistics[HEAD[0]].batches == 4 - refused
    assert all(bool(x.isfinite().all()) for x in model.parameters())


def test_an_optimizer_whose_state_cannot_be_resized() -> None:
    """A failure in the middle of the exchange puts back what was exchanged before it."""
    model, optimizer = started()
    grower = observed(model, optimizer)

    class Unusual(Tensor):
        """A state tensor that cannot be sliced."""

        def __getitem__(self, index: Any) -> Tensor:
            raise RuntimeError("no slices")

    state = optimizer.state[model.blocks[0].attend.key.bias]
    state["exp_avg"] = state["exp_avg"].as_subclass(Unusual)
    parameters, states = list(model.parameters()), dict(optimizer.state)
    weights = copy.deepcopy([p.data for p in parameters])
    with pytest.raises(RuntimeError, match="no slices"):
        grower.grow(p=1, heads=[HEAD])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
    assert optimizer.state.keys() == states.keys()
    assert all(optimizer.state[p]["exp_avg"] is states[p]["exp_avg"] for p in parameters)


def test_another_thread_does_not_disturb_the_watch() -> None:
    import threading

    model, optimizer = started()
    grower = Grower(model, optimizer)
    handle = nn.Module.register_forward_pre_hook(model.blocks[0].attend.value, lambda *_: elsewhere())

    def elsewhere() -> None:
        handle.remove()

        def run() -> None:
            with torch.no_grad():
                model(PROBE[0])

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    model.loss(*PROBE).backward()
    grower.observe()
    assert grower.statistics[HEAD[0]].batches == pytest.approx(1)
