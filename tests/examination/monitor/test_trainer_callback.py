"""A real run of transformers' Trainer: what reaches its logs, and what is left of the model."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import headwise
from headwise.errors import HeadwiseError
from headwise.examination.monitor import AlarmRules, History

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ORIGINAL = {"sdpa": F.scaled_dot_product_attention}


class Data(torch.utils.data.Dataset):
    def __init__(self, size: int = 64) -> None:
        self.ids = torch.randint(50, (size, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Recorder(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.seen.append(dict(logs))


class Before(Recorder):
    pass


class After(Recorder):
    pass


def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trainer(directory: Path, callbacks: list, model=None, **arguments):
    options = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = transformers.TrainingArguments(**(options | arguments))
    model = tiny() if model is None else model
    return transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=callbacks)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def numbers(logs: dict) -> dict:
    return {name: value for name, value in logs.items() if name.startswith("attention/")}


def test_every_logger_gets_the_numbers(tmp_path: Path) -> None:
    before, after, callback = Before(), After(), headwise.MonitorCallback(every=2)
    run = trainer(tmp_path, [before, callback, after])
    run.train()
    assert callback.monitor is not None
    history = callback.monitor.history
    assert history.steps == [0, 2, 4, 6]
    logged = [logs for logs in run.state.log_history if "loss" in logs]
    assert [logs["step"] for logs in logged] == [2, 4, 6, 8]
    for place, logs in enumerate(logged):
        measured = history.series("max_logit")[place].max().item()
        for seen in (logs, before.seen[place], after.seen[place]):
            assert seen["attention/max_logit"] == pytest.approx(measured)
            assert seen["attention/layers.1/entropy"] > 0
        assert numbers(before.seen[place]) == numbers(after.seen[place]) == numbers(logs)
        assert all(isinstance(value, float) for value in numbers(logs).values())
    assert not numbers(before.seen[-1])  # the summary at the end has no new measurement
    assert [step for step, _ in history.losses] == [2, 4, 6, 8]
    assert History.load(tmp_path / "attention_history.json").steps == [0, 2, 4, 6]


def test_a_callback_that_is_added_later_comes_first_too(tmp_path: Path) -> None:
    recorder = Recorder()
    run = trainer(tmp_path, [recorder], max_steps=2)
    run.add_callback(headwise.MonitorCallback(every=1, prefix="heads", per_head=True))
    run.train()
    assert "heads/layers.0/head.3/max_logit" in recorder.seen[0]


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    weights, hooks = [], []
    for callbacks in ([headwise.MonitorCallback(every=1, rank_every=1)], []):
        run = trainer(tmp_path, callbacks, gradient_accumulation_steps=2, max_steps=4)
        run.train()
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        hooks += [m for m in run.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert torch.equal(*weights)
    assert hooks == []
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]


@pytest.mark.parametrize("where", ["forward", "data"])
def test_an_exception_leaves_the_model_as_it_was(tmp_path: Path, where: str) -> None:
    callback = headwise.MonitorCallback(every=1)
    run = trainer(tmp_path, [callback])
    model = run.model

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    if where == "forward":
        model.model.layers[1].mlp.forward = fail
    else:
        run._prepare_inputs = fail
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
    if where == "forward":
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        del model.model.layers[1].mlp.forward
    else:
        del run._prepare_inputs
    run.train()  # the next run is not disturbed
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert callback.monitor is not None
    assert len(callback.monitor.history) >= 7


def test_checkpointing_and_accumulation_measure_the_first_forward_pass_once(tmp_path: Path) -> None:
    found = []
    for more in ({}, {"gradient_checkpointing": True}):
        callback = headwise.MonitorCallback(every=2, rows=None)
        trainer(tmp_path, [callback], gradient_accumulation_steps=2, max_steps=4, **more).train()
        assert callback.monitor is not None
        found.append(callback.monitor.history)
    assert found[0].steps == found[1].steps == [0, 2]
    torch.testing.assert_close(found[0].series("entropy"), found[1].series("entropy"))


def test_the_history_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    first = headwise.MonitorCallback(every=2)
    trainer(tmp_path, [first], max_steps=4, **saving).train()
    second = headwise.MonitorCallback(every=2)
    trainer(tmp_path, [second], max_steps=8, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert second.monitor is not None
    assert second.monitor.history.steps == [0, 2, 4, 6]
    assert second.monitor.history.losses[0][0] == 2


def test_an_alarm_makes_the_trainer_log(tmp_path: Path) -> None:
    rules = AlarmRules(logit_limit=-math.inf)  # every head is above it
    recorder = Recorder()
    callback = headwise.MonitorCallback(every=3, rules=rules, on_alarm=lambda alarm: None)
    trainer(tmp_path, [recorder, callback], max_steps=4, logging_steps=100).train()
    assert recorder.seen[0]["attention/alarms"] == 8.0
    assert "loss" in recorder.seen[0]


def test_what_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, [headwise.MonitorCallback()])
    run.args.torch_compile = True
    with pytest.raises(HeadwiseError, match="torch_compile = True compiles the model"):
        run.train()
