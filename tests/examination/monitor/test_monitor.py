"""The monitor around training steps: what it measures, and that it leaves no trace."""

from __future__ import annotations

import copy
import gc
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.errors import HeadwiseError
from headwise.examination.monitor import History, Monitor
from headwise.examination.monitor.history import NAMES, layer_names

ORIGINAL = {"sdpa": F.scaled_dot_product_attention}  # not by a name, which an interception would find


class Layer(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.checkpointed = checkpointed  # None, or use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x.square().mean()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor, monitor: Monitor, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        with monitor.step() as step:
            loss = model(x)
            loss.backward()
            step.loss = loss
        losses.append(loss.item())
    return losses


def same_numbers(a: History, b: History) -> None:
    assert a.heads == b.heads
    for name in NAMES:
        torch.testing.assert_close(a.series(name), b.series(name), equal_nan=True)


def test_every_second_step_is_measured(net: Net, x: Tensor) -> None:
    monitor = headwise.Monitor(net, every=2, rank_every=2)
    losses = train(net, x, monitor, 5)
    assert monitor.history.steps == [0, 2, 4]
    assert monitor.history.losses == [(0, losses[0]), (2, losses[2]), (4, losses[4])]
    assert [str(head) for head in monitor.history.heads] == [f"layers.{i} head {j}" for i in (0, 1) for j in (0, 1)]
    ranks = monitor.history.series("effective_rank")
    assert ranks.isfinite().all(1).tolist() == [True, False, True]
    assert [entry["step"] for entry in monitor.latest] == [4] * 4
    assert set(monitor.latest[0]) == {"step", "layer", "head", *NAMES}


def test_a_step_that_is_not_due_replaces_nothing(net: Net, x: Tensor) -> None:
    monitor = Monitor(net, every=2)
    with monitor.step():
        net(x)
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
    with monitor.step():
        assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_training_is_the_same_with_and_without(net: Net, x: Tensor) -> None:
    """Dropout included: weights, gradients and the random state after three steps of an optimizer."""
    other = copy.deepcopy(net)
    state = torch.get_rng_state()
    found = []
    for model, monitor in ((net, Monitor(net, every=1, rank_every=1)), (other, None)):
        torch.set_rng_state(state)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            if monitor is None:
                model(x).backward()
            else:
                with monitor.step():
                    model(x).backward()
            optimizer.step()
        found.append(([p.detach() for p in model.parameters()], [p.grad for p in model.parameters()], torch.rand(1)))
    for watched, alone in zip(found[0][0] + found[0][1], found[1][0] + found[1][1], strict=True):
        assert torch.equal(watched, alone)
    assert torch.equal(found[0][2], found[1][2])
    assert vars(net).keys() == vars(other).keys()


def _fail(*args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("due", [True, False])
def test_an_exception_leaves_nothing_behind(net: Net, x: Tensor, due: bool) -> None:
    monitor = Monitor(net, every=2)
    if not due:
        train(net, x, monitor)
    before = len(monitor.history)
    net.register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError), monitor.step():
        net(x)
    net._forward_hooks.clear()
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
    assert len(monitor.history) == before  # half a step is no measurement
    train(net, x, monitor, 2)
    assert len(monitor.history) == before + 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_counted(net: Net, x: Tensor, use_reentrant: bool) -> None:
    net.eval()
    plain = Monitor(net, every=1, rank_every=1)
    train(net, x, plain)
    net.checkpointed = use_reentrant
    x.requires_grad_()
    checkpointed = Monitor(net, every=1, rank_every=1)
    train(net, x, checkpointed)
    same_numbers(plain.history, checkpointed.history)


def test_accumulated_batches_are_one_measurement(net: Net, x: Tensor) -> None:
    net.eval()
    whole, parts = Monitor(net, every=1, rows=None), Monitor(net, every=1, rows=None)
    train(net, x, whole)
    with parts.step():
        for part in x.split(2):
            (net(part) / 2).backward()
    same_numbers(whole.history, parts.history)
    assert len(parts.history) == 1


def test_a_compiled_model_is_measured_as_written(net: Net, x: Tensor) -> None:
    net.eval()
    compiled = torch.compile(net, backend="eager")
    plain, of_compiled = Monitor(net, every=2), Monitor(compiled, every=2)
    train(net, x, plain, 3)
    train(compiled, x, of_compiled, 3)
    assert [head.layer for head in of_compiled.history.heads] == ["layers.0", "layers.0", "layers.1", "layers.1"]
    same_numbers(plain.history, of_compiled.history)
    net.compile(backend="eager")  # in place
    in_place = Monitor(net, every=2)
    train(net, x, in_place, 3)
    same_numbers(plain.history, in_place.history)
    torch._dynamo.reset()


def test_several_models_have_one_monitor(net: Net, x: Tensor) -> None:
    teacher = copy.deepcopy(net)
    monitor = Monitor({"student": net, "teacher": teacher}, every=1)
    with monitor.step():
        (net(x) - teacher(x).detach()).backward()
    layers = {head.layer for head in monitor.history.heads}
    assert layers == {f"{name}.layers.{i}" for name in ("student", "teacher") for i in (0, 1)}


def test_autocast_and_bfloat16(net: Net, x: Tensor) -> None:
    net.eval()
    exact, half = Monitor(net, every=1), Monitor(net, every=1)
    train(net, x, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(net, x, half)
    torch.testing.assert_close(exact.history.values[0], half.history.values[0], rtol=0.05, atol=0.02)
    wide = Monitor(net.bfloat16(), every=1)
    train(net, x.bfloat16(), wide)
    torch.testing.assert_close(exact.history.values[0], wide.history.values[0], rtol=0.05, atol=0.02)


def test_distributed_data_parallel_has_the_names_of_the_model(net: Net, x: Tensor, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(net)
        monitor = Monitor(parallel, every=1)
        train(parallel, x, monitor, 2)
        assert {head.layer for head in monitor.history.heads} == {"layers.0", "layers.1"}
        assert all(p.grad is not None for p in net.parameters())
        del parallel, monitor  # see tests/growth/test_distributed.py
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()


def _one_of_two(rank: int, folder: str) -> None:
    import torch._dynamo  # before the process group, whose threads it would keep beyond its end

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.manual_seed(0)
    parallel = nn.parallel.DistributedDataParallel(Net().eval())
    monitor = Monitor(parallel, every=2)
    train(parallel, torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(rank)), monitor, 3)
    gradient = torch.cat([p.grad.flatten() for p in parallel.parameters()])
    torch.save((monitor.history.to_dict(), gradient), f"{folder}/{rank}.pt")
    del parallel, monitor  # see tests/growth/test_distributed.py
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_measure_their_own_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_one_of_two, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    (first, one), (second, other) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["steps"] == second["steps"] == [0, 2]
    assert first["values"]["max_logit"] != second["values"]["max_logit"]
    assert torch.equal(one, other)


def test_numbers_for_a_logger(net: Net, x: Tensor) -> None:
    monitor = Monitor(net, every=1, rank_every=2)
    assert monitor.logs() == {}
    train(net, x, monitor)
    logs, heads = monitor.logs(), monitor.logs("a", per_head=True)
    assert all(isinstance(value, float) and math.isfinite(value) for value in logs.values())
    by_hand = monitor.history.series("max_logit")[-1]
    assert logs["attention/layers.1/max_logit"] == by_hand[2:].max().item()
    assert logs["attention/max_logit"] == by_hand.max().item()
    assert logs["attention/layers.0/entropy"] == monitor.history.series("entropy")[-1, :2].mean().item()
    assert heads["a/layers.1/head.1/max_logit"] == by_hand[3].item()
    assert "attention/layers.0/effective_rank" in logs
    train(net, x, monitor)
    assert "attention/layers.0/effective_rank" not in monitor.logs()


@pytest.mark.parametrize(
    "layers, names",
    [
        (["attn"], ["attn"]),
        (["bert.encoder.layer.0.attention.self", "bert.encoder.layer.11.attention.self"], ["layer.0", "layer.11"]),
        (["a", "b"], ["a", "b"]),
        (["block.attn", "block.attn@2"], ["block.attn", "block.attn@2"]),
        (
            ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"],
            ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"],
        ),
    ],
)
def test_names_of_layers(layers: list[str], names: list[str]) -> None:
    assert layer_names(layers) == names


def test_a_history_survives_a_restart(net: Net, x: Tensor, tmp_path: Path) -> None:
    net.eval()
    through = Monitor(net, every=2, rows=3, rank_every=2)
    train(net, x, through, 7)
    first = Monitor(net, every=2, rows=3, rank_every=2)
    train(net, x, first, 3)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = Monitor(net, every=2, rows=3, rank_every=2)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(net, x, second, 4)
    assert second.history.steps == through.history.steps == [0, 2, 4, 6]
    same_numbers_to_five_digits(second.history, through.history)


def same_numbers_to_five_digits(a: History, b: History) -> None:
    for name in NAMES:
        torch.testing.assert_close(a.series(name), b.series(name), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_a_history_is_a_file_and_a_table(net: Net, x: Tensor, tmp_path: Path) -> None:
    monitor = Monitor(net, every=3)
    train(net, x, monitor, 4)
    path = monitor.save(tmp_path / "run" / "history.json")
    again = History.load(path)
    assert again.to_dict() == monitor.history.to_dict()
    continued = Monitor(net, every=3)
    continued.load(path)
    assert continued.steps == 4
    monitor.save(path)  # replaced, as training goes on
    rows = monitor.history.to_dicts()
    assert [row["step"] for row in rows] == [0] * 4 + [3] * 4
    frame = pytest.importorskip("pandas") and monitor.to_pandas()
    assert list(frame.columns) == ["step", "layer", "head", *NAMES]
    assert len(frame) == 8


@pytest.mark.parametrize(
    "change, message",
    [
        ({"schema": 7}, "schema 7 is not 1"),
        ({"steps": [0]}, "must have 1 lists"),
        ({"losses": [[1]]}, "losses must be pairs"),
        ({"heads": [{"layer": 3, "head": 0}]}, "heads/0/layer must be a string"),
    ],
)
def test_a_damaged_file_is_refused(net: Net, x: Tensor, tmp_path: Path, change: dict, message: str) -> None:
    monitor = Monitor(net, every=1)
    train(net, x, monitor, 2)
    path = tmp_path / "history.json"
    path.write_text(json.dumps(monitor.history.to_dict() | change))
    with pytest.raises(HeadwiseError, match=message):
        History.load(path)


def test_a_layer_that_is_left_out_has_no_numbers(net: Net, x: Tensor) -> None:
    monitor = Monitor(net, every=1)
    with monitor.step():
        net.layers[0](x).sum().backward()
    train(net, x, monitor)
    with monitor.step():
        net.layers[0](x).sum().backward()
    assert monitor.history.series("max_logit").isnan().tolist() == [[False] * 2 + [n] * 2 for n in (True, False, True)]
    assert not any("layers.1" in name for name in monitor.logs())
    with monitor.step():
        pass  # no forward pass
    assert len(monitor.history) == 3


def test_a_model_without_attention_is_refused_at_once(x: Tensor) -> None:
    monitor = Monitor(nn.Linear(16, 16))
    with pytest.raises(HeadwiseError, match="never called scaled_dot_product_attention"), monitor.step():
        monitor.model(x)


def test_bad_arguments_are_named(net: Net) -> None:
    with pytest.raises(HeadwiseError, match="every = 0"):
        Monitor(net, every=0)
    with pytest.raises(HeadwiseError, match="takes a torch"):
        Monitor("model")
    with pytest.raises(HeadwiseError, match="no measure 'entropi'"):
        Monitor(net).history.series("entropi")
