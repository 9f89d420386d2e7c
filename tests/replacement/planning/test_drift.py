"""Drift: starting from the changed layer equals running the whole model, and the model is restored."""

from __future__ import annotations

import pytest
import torch

from headwise.replacement.planning.capture import capture, find_sites
from headwise.replacement.planning.drift import DriftTrial, difference, direction, layers_of, measure_for
from tests.models.tiny_models import ALL

pytest.importorskip("transformers")


def something_else(q, k, v, *, key_mask, causal, scale):
    """Far from attention, so that the drift is far above rounding."""
    return 30 * torch.randn(q.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "vit"])
def test_starting_from_the_changed_layer_equals_the_whole_model(family: str) -> None:
    torch.manual_seed(0)
    model, batch = ALL[family]()
    model.eval()
    found = find_sites(model, batch)
    measure, _ = measure_for(model, batch, causal=next(iter(found.values())).causal)
    drifts = {}
    for short in (True, False):
        trial = DriftTrial(model, [batch], measure, list(found))
        assert len(trial.layers) == len(found)
        if not short:
            trial.layers = {}
        with trial.open():
            drifts[short] = [trial.drifts({name: something_else})[0] for name in found]
            assert trial.drifts({})[0].abs().max() < 1e-9
    for short, whole in zip(drifts[True], drifts[False], strict=True):
        assert whole.min() > 1e-5
        torch.testing.assert_close(short, whole, rtol=1e-5, atol=1e-9)


def test_the_model_is_restored() -> None:
    model, batch = ALL["gpt2"]()
    model.train()
    before = model.config.use_cache
    trial = DriftTrial(model, [batch], measure_for(model, batch, causal=True)[0], list(find_sites(model.eval(), batch)))
    model.train()
    seen = []
    with pytest.raises(ZeroDivisionError), trial.open():
        seen.append(model.training or 1 / 0)
    assert model.training
    assert model.config.use_cache == before
    assert all("forward" not in vars(layer) for layer in trial.layers.values())


def test_half_the_square_of_the_direction_is_the_drift() -> None:
    before = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = before + 1e-3 * torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        difference(before, after), direction(before, after).square().sum(-1) / 2, rtol=1e-2, atol=0
    )


def test_captured_padding_stands_at_the_end() -> None:
    torch.manual_seed(0)
    model, _ = ALL["bert"]()
    ids = torch.randint(99, (2, 10))
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6])
    batch = {"input_ids": ids, "attention_mask": mask}
    name = next(iter(find_sites(model.eval(), batch)))
    (sample,) = capture(model, [batch], [name])[name]
    x = sample.inputs
    assert x.mask.key_mask is not None
    assert x.mask.key_mask[1, 0].tolist() == [True] * 6 + [False] * 4
    weights = (x.scale * x.q @ x.k.mT).masked_fill(~x.mask.key_mask[:, None], -1e30).softmax(-1)
    torch.testing.assert_close(weights @ sample.v, sample.output, atol=1e-5, rtol=1e-4)


def test_layers_are_members_of_lists() -> None:
    model, batch = ALL["bert"]()
    found = layers_of(model, list(find_sites(model.eval(), batch)))
    assert [type(layer).__name__ for layer in found.values()] == ["BertLayer", "BertLayer"]
    assert layers_of(model, ["embeddings"]) == {}


def test_a_text_that_is_all_masked_has_not_moved() -> None:
    before, after = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert difference(before, after).tolist() == [1.0, 0.0]
    assert difference(before, after[[0, 0]]).tolist() == [1.0, 1.0]
    assert direction(before, after).tolist() == [[0.0, 1.0], [0.0, 0.0]]
