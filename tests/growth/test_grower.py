"""Growth in a training loop: its undo, optimizers, precision, compilation, checkpoints, metrics, and misuse."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.grow_baselines import gradmax, plain_svd, random_both, random_queries
from torch import Tensor, nn

import headwise
from headwise.errors import InputError, NonFiniteError, ShapeError, UnsupportedError
from headwise.growth import Grower, Problem, register_metric
from headwise.growth.demo import Reader, Task, average, lookup
from headwise.growth.metric import METRICS
from headwise.growth.solve import preserving
from headwise.nn import MultiHead, head_slices
from headwise.operators.uniform import uniform

TASK = lookup(keys=24, values=6, pairs=8, queries=4)
HEAD = ("blocks.0.attend", 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(make: Callable[..., torch.optim.Optimizer] | None = None, steps: int = 60, task: Task = TASK) -> Any:
    """A small reader that has been trained a little, and its optimizer: trained once, copied for every test."""
    return copy.deepcopy(trained(make, steps, task))


@functools.cache
def trained(make: Callable[..., torch.optim.Optimizer] | None, steps: int, task: Task) -> Any:
    torch.manual_seed(0)
    model = Reader(task, width=16, layers=1, heads=2, key_width=2)
    optimizer = (make or (lambda p: torch.optim.AdamW(p, 5e-3)))(model.parameters())
    draws = generator(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*task.draw(32, draws)).backward()
        optimizer.step()
    return model, optimizer


def observed(model: Reader, optimizer: torch.optim.Optimizer, batches: int = 6, **options: Any) -> Grower:
    grower, draws = Grower(model, optimizer, **options), generator(2)
    for _ in range(batches):
        optimizer.zero_grad()
        model.loss(*TASK.draw(32, draws)).backward()
        grower.observe()
    return grower


HELD = TASK.draw(128, generator(3))
PROBE = TASK.draw(16, generator(4))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def assert_untouched(model: nn.Module, optimizer: torch.optim.Optimizer, before: tuple[Any, Any]) -> None:
    now = snapshot(model, optimizer)
    assert now[0].keys() == before[0].keys()
    for name, x in before[0].items():
        assert torch.equal(now[0][name], x), name
    torch.testing.assert_close(now[1]["state"], before[1]["state"], rtol=0, atol=0)
    assert now[1]["param_groups"] == before[1]["param_groups"]


def test_grower_is_exported_at_the_top_level() -> None:
    assert headwise.Grower is Grower


@pytest.mark.parametrize("optimizer", [None, [], [None], "adam"])
def test_an_optimizer_is_needed(optimizer: Any) -> None:
    with pytest.raises(InputError, match="Grower: optimizer must be an optimizer of torch or a list of them, but is "):
        Grower(Reader(lookup(8, 4, 4, 2), width=8, layers=1, heads=2, key_width=2), optimizer)


def test_growth_lowers_the_held_out_loss_and_can_be_undone() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    logits = model(PROBE[0]).detach()
    assert [s.validated for s in grower.scores()] == sorted((s.validated for s in grower.scores()), reverse=True)
    event = grower.grow(loss=lambda: model.loss(*HELD))
    assert event.changes
    assert event.measured is not None
    assert event.loss_before is not None
    assert event.measured < -0.05 * event.loss_before
    assert event.predicted < 0
    assert event.loss_after == pytest.approx(model.loss(*HELD).item(), abs=1e-6)
    assert event.parameters_added == sum((c.after - c.before) * (16 + 16 + 2) for c in event.changes)
    for change in event.changes:
        assert change.after > change.before
        assert change.bottleneck_after < change.bottleneck_before
    assert model.blocks[0].attend.key_widths != (2, 2)
    assert "measured -" in str(event)
    assert event.to_dict()["changes"]
    event.undo()
    assert_untouched(model, optimizer, before)
    assert torch.equal(model(PROBE[0]), logits)
    event.undo()  # a second time does nothing
    assert_untouched(model, optimizer, before)


def test_growth_without_a_held_out_loss() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    before = model.loss(*HELD).item()
    event = grower.grow(p="auto", heads="auto")
    assert event.changes
    assert event.measured is None
    assert event.score_step == pytest.approx(0.5, rel=0.01)  # measured; the step of the search is in the damped metric
    assert model.loss(*HELD).item() < before - 0.01


def test_a_step_of_zero_does_not_move_the_scores_though_the_scale_changes() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    logits = model(PROBE[0]).detach()
    event = grower.grow(p=3, heads=[HEAD], loss=lambda: model.loss(*HELD), solutions=(preserving,))
    assert model.blocks[0].attend.key_widths == (2, 5)
    assert event.changes[0].after == 5
    torch.testing.assert_close(model(PROBE[0]), logits, rtol=1e-5, atol=1e-5)


def unit_metric(problem: Problem) -> tuple[Tensor, Tensor]:
    """Every direction of the weights costs the same, whatever the tokens are."""
    return torch.eye(len(problem.gram_q)), torch.eye(len(problem.gram_k))


@pytest.fixture
def registered_metric() -> Iterator[str]:
    register_metric("unit", unit_metric)
    yield "unit"
    del METRICS["unit"]


def test_a_registered_metric_ranks_heads_and_joins_the_line_search(registered_metric: str) -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    assert grower.scores(registered_metric) != grower.scores()
    event = grower.grow(metric=registered_metric, loss=lambda: model.loss(*HELD))
    assert {"gram", "fisher", "unit"} == {name for name, _, _ in event.tried}
    event.undo()
    grower = observed(model, optimizer)
    event = grower.grow(p=1, heads=[HEAD], loss=lambda: model.loss(*HELD), solutions=["unit"])
    assert event.solution == "unit"
    with pytest.raises(InputError, match="already a metric 'gram'"):
        register_metric("gram", unit_metric)
    grower = observed(model, optimizer)
    with pytest.raises(InputError, match="no metric 'none'; registered are gram, fisher, unit"):
        grower.scores("none")
    with pytest.raises(InputError, match="no solution 'none'; there are gram, fisher, unit, refit"):
        grower.grow(p=1, heads=[HEAD], solutions=["none"])


@pytest.mark.parametrize("solution", ["gram", "fisher", "refit", plain_svd, random_both, random_queries, gradmax])
def test_every_solution_installs_and_goes_on_training(solution: Any) -> None:
    torch.manual_seed(0)
    model, optimizer = started()
    grower = observed(model, optimizer)
    event = grower.grow(p=2, heads=[HEAD], loss=lambda: model.loss(*HELD), solutions=(solution,))
    assert event.solution == (solution if isinstance(solution, str) else solution.__name__)
    train_on(model, optimizer, 5)


def train_on(model: Reader, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draws = generator(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(*TASK.draw(32, draws)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor) and value.dim():
                    assert value.shape == p.shape


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 5e-3),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 5e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_with_every_parameter(name: str) -> None:
    model, optimizer = started(OPTIMIZERS[name], steps=20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    grower = observed(model, optimizer)
    grower.grow(p=1, heads=[HEAD], loss=lambda: model.loss(*HELD))
    rate = optimizer.param_groups[0]["lr"]
    if name == "adafactor":  # factored state has other shapes than the parameters
        model.loss(*HELD).backward()
        optimizer.step()
    else:
        train_on(model, optimizer, 3)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] < rate


def test_optimizer_state_of_old_directions_is_kept_and_new_ones_do_not_leap() -> None:
    model, optimizer = started(lambda p: torch.optim.Adam(p, 1e-3))
    layer: MultiHead = model.blocks[0].attend
    old = {key: optimizer.state[layer.query.weight][key].clone() for key in ("exp_avg", "exp_avg_sq", "step")}
    old_key = optimizer.state[layer.key.weight]["exp_avg"].clone()
    grower = observed(model, optimizer, batches=12, pace=1.0)
    grower.grow(p=2, heads=[HEAD], loss=lambda: model.loss(*HELD), solutions=("gram",))
    state = optimizer.state[layer.query.weight]
    first, second = head_slices(layer.key_widths)
    stretch = math.sqrt(4 / 2)
    assert torch.equal(state["step"], old["step"])
    torch.testing.assert_close(state["exp_avg"][first], old["exp_avg"][:2])
    torch.testing.assert_close(state["exp_avg"][second][:2], old["exp_avg"][2:] / stretch)
    torch.testing.assert_close(state["exp_avg_sq"][second][:2], old["exp_avg_sq"][2:] / stretch**2)
    torch.testing.assert_close(optimizer.state[layer.key.weight]["exp_avg"][second][:2], old_key[2:])
    for parameter in (layer.query.weight, layer.key.weight):
        assert bool((optimizer.state[parameter]["exp_avg_sq"][second][2:] > 0).all())
    before = layer.query.weight.detach().clone()
    optimizer.zero_grad()
    model.loss(*TASK.draw(32, generator(6))).backward()
    optimizer.step()
    moved = (layer.query.weight.detach() - before)[second][2:].abs().mean() / 1e-3
    assert moved < 1.5  # zeros under an old step counter: about 3


def test_calibrated_state_is_that_of_real_gradients() -> None:
    """The state of new rows against the mean and mean square of gradients taken batch by batch after a tiny step."""
    model, optimizer = started(lambda p: torch.optim.Adam(p, 1e-3), steps=30)
    model.double()
    for state in optimizer.state.values():
        state.update({key: x.double() for key, x in state.items() if x.dim()})
    layer: MultiHead = model.blocks[0].attend
    grower = observed(model, optimizer, batches=40, rows=None, pace=1.0)
    grower.grow(p=2, heads=[HEAD], solutions=("gram",))
    state = optimizer.state[layer.query.weight]
    rows = head_slices(layer.key_widths)[1]
    gradients, draws = [], generator(2)
    for _ in range(40):
        optimizer.zero_grad()
        model.loss(*TASK.draw(32, draws)).backward()
        assert layer.query.weight.grad is not None
        gradients.append(layer.query.weight.grad[rows][2:].clone())
    real = torch.stack(gradients)
    assert float(torch.cosine_similarity(state["exp_avg"][rows][2:].flatten(), real.mean(0).flatten(), 0)) > 0.9
    ratio = state["exp_avg_sq"][rows][2:].mean() / real.square().mean()
    assert 0.4 < ratio < 2.5


def test_new_directions_start_at_a_multiple_of_the_pace_and_old_ones_do_not() -> None:
    moved = {}
    for pace in (1.0, 3.0):
        model, optimizer = started(lambda p: torch.optim.Adam(p, 1e-3))
        layer: MultiHead = model.blocks[0].attend
        grower = observed(model, optimizer, batches=12, pace=pace)
        grower.grow(p=2, heads=[HEAD], loss=lambda m=model: m.loss(*HELD), solutions=("gram",))
        second = head_slices(layer.key_widths)[1]
        before = layer.query.weight.detach().clone()
        optimizer.zero_grad()
        model.loss(*TASK.draw(32, generator(6))).backward()
        optimizer.step()
        moved[pace] = (layer.query.weight.detach() - before)[second].abs().mean(1)
    torch.testing.assert_close(moved[3.0][:2], moved[1.0][:2])
    assert bool((moved[3.0][2:] > 2 * moved[1.0][2:]).all())
    # a refit replaces all directions: none is younger than the others
    model, optimizer = started(lambda p: torch.optim.Adam(p, 1e-3))
    squares = []
    for pace in (1.0, 3.0):
        copied, other = copy.deepcopy((model, optimizer))
        grower = observed(copied, other, batches=6, pace=pace)
        grower.grow(p=2, heads=[HEAD], loss=lambda m=copied: m.loss(*HELD), solutions=("refit",))
        squares.append(other.state[copied.blocks[0].attend.query.weight]["exp_avg_sq"])
    torch.testing.assert_close(*squares)


def test_mixed_precision_and_scaled_gradients() -> None:
    model, optimizer = started()
    grower, draws = Grower(model, optimizer), generator(2)
    exact = observed(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(*TASK.draw(32, draws))
        scaler.scale(loss).backward()
        grower.observe(scale=scaler.get_scale())
    name = HEAD[0]
    ours, theirs = (g.statistics[name].folds for g in (grower, exact))
    assert float((ours - theirs).norm() / theirs.norm()) < 0.1
    exact.close()
    event = grower.grow(p=1, heads=[HEAD], loss=lambda: model.loss(*HELD))
    assert event.changes
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(*HELD).backward()


def test_gradient_accumulation_counts_every_backward() -> None:
    model, optimizer = started()
    whole, parts = Grower(model, optimizer, rows=None), Grower(model, optimizer, rows=None)
    tokens, answers = TASK.draw(32, generator(2))
    parts.pause()
    model.loss(tokens, answers).backward()
    whole.observe()
    whole.pause()
    parts.resume()
    for half in (slice(0, 16), slice(16, 32)):
        model.loss(tokens[half], answers[half]).backward()
        parts.observe()
    first, second = (g.statistics[HEAD[0]] for g in (whole, parts))
    assert second.batches == pytest.approx(2)
    torch.testing.assert_close(first.folds.sum(0), second.folds.sum(0) / 2, rtol=1e-3, atol=1e-6)
    with pytest.raises(InputError, match="no backward pass"):
        whole.observe()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised and hidden inside torch.compile
def test_a_compiled_model_is_observed_and_recompiles() -> None:
    model, optimizer = started(steps=10)
    compiled: Any = torch.compile(model, backend="aot_eager")
    grower, draws = Grower(compiled, optimizer), generator(2)
    plain = Grower(model, optimizer)
    for _ in range(2):
        tokens, answers = TASK.draw(8, draws)
        optimizer.zero_grad()
        logits = compiled(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-100).backward()
        grower.observe()
        plain.observe()
    assert list(grower.layers) == [HEAD[0]]
    torch.testing.assert_close(grower.statistics[HEAD[0]].folds, plain.statistics[HEAD[0]].folds)
    plain.close()
    grower.grow(p=2, heads=[HEAD], loss=lambda: model.loss(*HELD))
    torch.testing.assert_close(compiled(PROBE[0]), model(PROBE[0]))
    assert model.blocks[0].attend.key_widths == (2, 4)
    torch.compiler.reset()


def test_a_grown_checkpoint_loads_into_a_fresh_model() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    grower.grow(p=2, heads=[HEAD])
    grower.close()
    assert grower.layers[HEAD[0]].module.build.__name__ == "softmax"  # type: ignore[union-attr]
    fresh = Reader(TASK, width=16, layers=1, heads=2, key_width=2)
    fresh.load_state_dict(model.state_dict())
    assert fresh.get_submodule(HEAD[0]).key_widths == (2, 4)
    torch.testing.assert_close(fresh(PROBE[0]), model(PROBE[0]))
    again = torch.optim.AdamW(fresh.parameters(), 5e-3)
    again.load_state_dict(optimizer.state_dict())
    fresh.loss(*HELD).backward()
    again.step()


def test_shrinking_keeps_the_scores_and_says_what_it_costs() -> None:
    model, optimizer = started()
    grower = observed(model, optimizer)
    grower.grow(p=2, heads=[HEAD], solutions=(preserving,))  # two silent dimensions
    logits = model(PROBE[0]).detach()
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(*HELD).backward()
        grower.observe()
    event = grower.shrink(2, [HEAD], loss=lambda: model.loss(*HELD))
    assert [(c.before, c.after) for c in event.changes] == [(4, 2)]
    assert event.parameters_added == -2 * (16 + 16 + 2)
    assert abs(event.predicted) < 1e-4
    assert event.measured == pytest.approx(0, abs=1e-4)
    torch.testing.assert_close(model(PROBE[0]), logits, rtol=1e-3, atol=1e-3)
    train_on(model, optimizer, 3)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(*HELD).backward()
        grower.observe()
    costly = grower.shrink(1, [HEAD], loss=lambda: model.loss(*HELD))
    assert costly.score_step > 0.01
    assert costly.measured is not None
    assert costly.measured > 0
    with pytest.raises(InputError, match="no statistics"):
        grower.shrink(1, [HEAD])


def test_where_width_is_not_the_bottleneck_nothing_grows() -> None:
    task = average(keys=24, values=6, pairs=8, queries=4)
    model, optimizer = started(task=task, steps=200)
    grower, draws = Grower(model, optimizer), generator(2)
    for _ in range(12):
        optimizer.zero_grad()
        model.loss(*task.draw(32, draws)).backward()
        grower.observe()
    before = snapshot(model, optimizer)
    event = grower.grow(loss=lambda: model.loss(*task.draw(256, generator(3))))
    assert not event.changes
    assert "nothing changed" in str(event)
    assert_untouched(model, optimizer, before)


def test_misuse_raises_and_leaves_the_model_untouched() -> None:
    model, optimizer = started(steps=5)
    with pytest.raises(InputError, match="has no trainable MultiHead layer"):
        Grower(nn.Linear(2, 2), optimizer)
    with pytest.raises(InputError, match=r"optimizer does not hold blocks.0.attend.query.weight"):
        Grower(model, torch.optim.SGD(model.read.parameters(), 0.1))
    with pytest.raises(InputError, match="pace must be above 0, but is 0"):
        Grower(model, optimizer, pace=0)
    grower = Grower(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(InputError, match="no backward pass has reached"):
        grower.observe()
    with pytest.raises(InputError, match="no statistics; call observe"):
        grower.grow()
    model(PROBE[0])  # forward only
    with pytest.raises(InputError, match="no backward pass has reached"):
        grower.observe()
    (model.loss(*PROBE) * math.nan).backward()
    with pytest.raises(NonFiniteError, match=r"gradient of blocks.0.attend's heads has \d+ non-finite"):
        grower.observe()
    assert grower.statistics[HEAD[0]].batches == 0
    (model.read.weight.sum() + 0 * model(PROBE[0]).sum()).backward()  # a loss that the heads do not touch
    grower.observe()
    with pytest.raises(InputError, match="no statistics"):
        grower.grow(p=1, heads=[HEAD])
    model.loss(*PROBE).backward()
    grower.observe()
    with pytest.raises(InputError, match=r"there is no head \('nowhere', 0\) with statistics; there are"):
        grower.grow(p=1, heads=[("nowhere", 0)])
    with pytest.raises(ShapeError, match="room for 14 more dimensions, not p = 15"):
        grower.grow(p=15, heads=[HEAD])
    assert_untouched(model, optimizer, before)

    def broken() -> float:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        grower.grow(p=1, heads=[HEAD], loss=broken)
    calls = iter([1.0, 0.9])
    with pytest.raises(StopIteration):  # in the middle of the line search
        grower.grow(p=1, heads=[HEAD], loss=lambda: next(calls))
    assert_untouched(model, optimizer, before)


def test_a_head_at_full_rank_has_no_room() -> None:
    torch.manual_seed(0)
    model = Reader(TASK, width=8, layers=1, heads=2, key_width=(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    grower = observed(model, optimizer)
    before = snapshot(model, optimizer)
    with pytest.raises(ShapeError, match=r"8 wide and at 8 it can express every bilinear score.*room for 0 more"):
        grower.grow(p=1, heads=[("blocks.0.attend", 0)], loss=lambda: model.loss(*HELD))
    with pytest.raises(ShapeError, match="room for 0 more"):
        grower.grow(p="auto", heads=[("blocks.0.attend", 0)])
    assert_untouched(model, optimizer, before)
    assert {s.head: s.bottleneck for s in grower.scores()}[0] < 1e-12  # at full width it can express everything
    event = grower.grow(loss=lambda: model.loss(*HELD))  # the automatic choice leaves it out
    assert all(change.head == 1 for change in event.changes)


def test_a_head_without_gradient_is_named() -> None:
    model, optimizer = started(steps=5)
    layer: MultiHead = model.blocks[0].attend
    with torch.no_grad():
        layer.out.weight[:, head_slices(layer.value_widths)[1]] = 0
    grower = observed(model, optimizer, batches=2)
    with pytest.raises(InputError, match=r"loss does not depend on the scores of head 1 of blocks.0.attend"):
        grower.grow(p=1, heads=[HEAD])


def test_other_operators_are_refused_by_name() -> None:
    model = MultiHead(8, 2, build=uniform)
    with pytest.raises(UnsupportedError, match=r"is built by uniform, which does not say that P depends on q.k"):
        Grower(model, torch.optim.SGD(model.parameters(), 0.1))


def test_watching_keeps_no_graph_and_no_old_passes() -> None:
    """Stored passes do not keep graphs alive, and a pass that was not taken is dropped by the next one."""
    model, optimizer = started(steps=2)
    grower = Grower(model, optimizer)
    for _ in range(5):
        model.loss(*PROBE).backward()
    (watch,) = grower._watches.values()
    assert len(watch.passes) == 1
    for _ in range(40):
        model(PROBE[0])
    assert len(watch.passes) <= 17
    grower.pause()
    model.loss(*PROBE).backward()
    assert not watch.passes
    grower.close()
    assert not model.blocks[0].attend.query._forward_pre_hooks
