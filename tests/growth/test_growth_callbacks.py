"""Growth inside transformers' Trainer and, where it is installed, Lightning's; its hooks also with a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headwise.errors import InputError
from headwise.growth.callbacks import GrowthCallback, GrowthSchedule, LightningGrowthCallback
from headwise.growth.demo import Reader, lookup
from tests.growth.test_transformers_growth import llama

transformers = pytest.importorskip("transformers")
TASK = lookup(keys=24, values=6, pairs=8, queries=4)


def test_the_trainer_grows_a_llama_and_its_checkpoint_carries_the_widths(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = llama()
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (64, 12), generator=draws)
    ids[:, 6:] = ids[:, :6]  # the second half repeats the first
    held = {"input_ids": ids[:16], "labels": ids[:16]}
    heads = [("model.layers.0.self_attn", 1)]
    callback = GrowthCallback(lambda model: model(**held).loss, every=6, observe=4, until=6, p=2, heads=heads)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=9, per_device_train_batch_size=8, learning_rate=5e-3, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids[16:]]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    ((step, event),) = callback.events
    assert step == 6
    assert [(c.head, c.before, c.after) for c in event.changes] == [(1, 6, 8)]
    new = model.model.layers[0].self_attn.headwise_widths
    assert float(trainer.optimizer.optimizer.state[new.key_weight]["exp_avg_sq"].sum()) > 0
    inner = trainer.optimizer.optimizer
    assert any(p is new.key_weight for group in inner.param_groups for p in group["params"])
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(again(**held).loss, model.eval()(**held).loss)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(TASK, width=16, layers=1, heads=2, key_width=1)


def test_lightning_calls_observe_before_and_grow_after_steps() -> None:
    torch.manual_seed(0)
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    draws = torch.Generator().manual_seed(1)
    held = TASK.draw(64, draws)
    callback = LightningGrowthCallback(lambda reader: reader.loss(*held), every=40, observe=8, attention="reader")
    trainer: Any = SimpleNamespace(global_step=0, optimizers=[optimizer])
    callback.on_train_start(trainer, module)
    for step in range(80):
        for last in (False, True):  # two batches make a step
            module.reader.loss(*TASK.draw(16, draws)).backward()
            if last:
                callback.on_before_optimizer_step(trainer, module, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                trainer.global_step = step + 1
            callback.on_train_batch_end(trainer, module, None, None, step)
    callback.on_train_end(trainer, module)
    assert [step for step, _ in callback.events] == [40, 80]
    assert any(event.changes for _, event in callback.events)
    assert sum(module.reader.blocks[0].attend.key_widths) > 2


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightnings_trainer_grows_clips_accumulates_and_saves(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader(TASK, width=16, layers=1, heads=2, key_width=1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.reader.loss(*batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    held, data = TASK.draw(64, draws), [TASK.draw(16, draws) for _ in range(160)]
    callback = LightningGrowthCallback(lambda reader: reader.loss(*held), every=40, observe=8, attention="reader")
    module = Lit()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=[callback], accumulate_grad_batches=2,
        gradient_clip_val=1.0, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    assert [step for step, _ in callback.events] == [40, 80]
    assert sum(module.reader.blocks[0].attend.key_widths) > 2
    (optimizer,) = trainer.optimizers
    held_parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held_parameters == {id(p) for p in module.parameters()}
    assert all(state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    again = Lit()
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    again.load_state_dict(saved["state_dict"])
    torch.testing.assert_close(again.reader.loss(*held), module.reader.loss(*held))


def test_a_schedule_needs_steps() -> None:
    with pytest.raises(InputError, match="every must be at least 1, but is 0"):
        GrowthSchedule(lambda model: 0.0, every=0)
