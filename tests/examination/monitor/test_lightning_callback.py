"""The callback for Lightning: its hooks with a stand-in for the Trainer, and a real run where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.examination.monitor import LightningMonitorCallback
from tests.examination.monitor.test_monitor import Net

ORIGINAL = {"sdpa": F.scaled_dot_product_attention}


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []

    def log_metrics(self, metrics: dict, step: int) -> None:
        self.logged.append((step, metrics))


def batch() -> Tensor:
    return torch.randn(2, 6, 16)


def run(callback, net: nn.Module, steps: range, accumulated: int = 1) -> Logger:
    """The order in which Lightning calls the hooks."""
    logger = Logger()
    trainer = SimpleNamespace(global_step=0, loggers=[logger], callback_metrics={})
    callback.on_train_start(trainer, net)
    for step in steps:
        trainer.global_step = step
        for index in range(accumulated):
            callback.on_train_batch_start(trainer, net, None, index)
            loss = net(batch())
            loss.backward()
            callback.on_train_batch_end(trainer, net, {"loss": loss}, None, index)
    return logger


def test_numbers_reach_the_loggers_when_they_are_measured() -> None:
    callback = LightningMonitorCallback(every=2, per_head=True)
    logger = run(callback, Net(), range(5), accumulated=2)
    assert [step for step, _ in logger.logged] == [0, 2, 4]
    assert "attention/layers.1/head.1/max_logit" in logger.logged[0][1]
    assert callback.monitor is not None
    assert [step for step, _ in callback.monitor.history.losses] == [0, 2, 4]


def test_an_exception_leaves_nothing_behind() -> None:
    callback, net = LightningMonitorCallback(every=1), Net()
    trainer = SimpleNamespace(global_step=0, loggers=[], callback_metrics={})
    callback.on_train_start(trainer, net)
    callback.on_train_batch_start(trainer, net, None, 0)
    net(batch())
    callback.on_exception(trainer, net, KeyboardInterrupt())
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
    assert callback.monitor is not None
    assert len(callback.monitor.history) == 0


def test_the_history_is_part_of_the_checkpoint() -> None:
    first, net = LightningMonitorCallback(every=2), Net()
    assert first.state_dict() == {}
    run(first, net, range(4))
    second = LightningMonitorCallback(every=2)
    second.load_state_dict(first.state_dict())
    run(second, net, range(4, 7))
    assert second.monitor is not None
    assert second.monitor.history.steps == [0, 2, 4, 6]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_real_run(tmp_path: Path) -> None:
    import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return self.net(batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    def fit(steps: int, checkpoint: str | None = None):
        callback = LightningMonitorCallback(every=2)
        trainer = pl.Trainer(
            max_steps=steps,
            callbacks=[callback],
            logger=CSVLogger(tmp_path),
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        module = Module()
        loader = torch.utils.data.DataLoader(torch.randn(64, 6, 16), batch_size=4)
        trainer.fit(module, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        assert callback.monitor is not None
        return callback.monitor.history

    assert fit(5).steps == [0, 2, 4]
    assert fit(9, str(tmp_path / "last.ckpt")).steps == [0, 2, 4, 6, 8]
    written = "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))
    assert "attention/net.layers.0/max_logit" in written or "attention/layers.0/max_logit" in written
    assert F.scaled_dot_product_attention is ORIGINAL["sdpa"]
