"""Running a model leaves it as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.errors import InputError
from headwise.models.run import OwnHook, as_it_was, blocks_of, first_sequence, run_model
from tests.models.tiny_models import bert


def test_as_it_was_restores_every_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()

    def fail() -> None:
        with as_it_was(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]


class Attend(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(input[:, None], input[:, None], input[:, None])


@pytest.mark.parametrize("kind", ["keywords", "positions", "tensor"])
def test_the_first_sequence_of_every_form_of_batch(kind: str) -> None:
    x = torch.randn(3, 4, 2)
    batch = {"keywords": {"input": x}, "positions": [x], "tensor": x}[kind]
    model = Attend()
    out = run_model(model, first_sequence(model, batch, torch.float64))
    torch.testing.assert_close(out, model(x.double())[:1])


BAD_BATCHES = {
    "an empty batch": ({"input_ids": torch.zeros(0, 4).long()}, r"input_ids has shape \(0, 4\): an empty batch"),
    "a batch without tokens": ([torch.zeros(2, 0).long()], r"input 0 has shape \(2, 0\)"),
    "meta tensors": (torch.zeros(1, 4, device="meta"), "input is on the meta device and has no values"),
    "one batch instead of a list": ("input_ids", "but this one is a str; give a list of batches"),
    "nothing": (None, "but this one is a NoneType"),
    "no tensor": ({"input_ids": [1, 2]}, "a batch needs a tensor, but this dict of 1 entries has none"),
    "another dtype": (
        {"input_ids": torch.rand(1, 4)},
        r"BertModel does not run on the batch input_ids \(1, 4\) float32",
    ),
    "another name": ({"words": torch.zeros(1, 4).long()}, r"BertModel does not run on the batch words \(1, 4\) int64"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_a_model_does_not_take_gets_a_sentence(name: str) -> None:
    batch, message = BAD_BATCHES[name]
    with pytest.raises(InputError, match=message):
        run_model(bert()[0], batch)


def test_an_assertion_of_the_model_is_about_the_batch() -> None:
    """torch's own layers check the width of their input by an assertion."""
    with pytest.raises(InputError, match=r"does not run on the batch input \(2, 3, 7\) float32: AssertionError"):
        run_model(torch.nn.TransformerEncoderLayer(8, 2), torch.randn(2, 3, 7))


@pytest.mark.parametrize("texts", [1, 2])
def test_a_text_that_is_all_masked_is_named(texts: int) -> None:
    model, batch = bert()
    ids = batch["input_ids"].repeat(texts, 1)
    keep = torch.ones_like(ids)
    keep[-1] = 0
    with pytest.raises(InputError, match=f"mask of text {texts - 1} of the batch hides all of its 40 keys"):
        headwise.examine(model, [{"input_ids": ids, "attention_mask": keep}])


def test_a_hook_that_an_interrupt_left_is_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    theirs = model[0].register_forward_hook(lambda *_: None)

    def interrupted() -> None:
        with as_it_was(model):
            model[0].register_forward_hook(OwnHook(lambda *_: None), with_kwargs=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [*model[0]._forward_hooks] == [theirs.id]
    assert not model[0]._forward_hooks_with_kwargs


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(), 2)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (nn.Sequential(nn.Linear(8, 8), encoder(), nn.Linear(8, 8)), ["1.layers.0", "1.layers.1"]),
        (nn.Sequential(nn.Linear(8, 8), layer(), layer(), nn.Linear(8, 8)), ["1", "2"]),
        (nn.Sequential(nn.Linear(8, 8), layer()), ["1"]),
        (nn.Sequential(encoder(), encoder()), ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"]),
    ],
)
def test_a_sequence_of_parts_does_not_hide_blocks(model: nn.Module, blocks: list[str]) -> None:
    assert list(blocks_of(model)) == blocks
