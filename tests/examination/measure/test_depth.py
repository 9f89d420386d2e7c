"""Path lengths and ablations against plain re-implementations of small models."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.examination import examine, with_depth
from headwise.examination.advice import with_advice
from headwise.examination.measure.depth import CURVES, collapse_curves
from headwise.examination.measure.path_lengths import by_length
from headwise.theory.collapse import relative_residual
from tests.models.saved_models import CONVOLUTIONS
from tests.models.tiny_models import ALL, sharpen


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "albert", "vit"])
def test_paths_add_up_to_the_output(family: str) -> None:
    model, batch = ALL[family]()
    found = by_length(sharpen(model), batch)
    assert found["supported"], found
    assert found["sum_error"] < 1e-6  # Llama's norms compute in float32 inside
    assert sum(found["share"]) == pytest.approx(1, abs=1e-6)
    assert len(found["share"]) == (5 if family == "albert" else 3)


def test_paths_equal_brute_force_enumeration() -> None:
    """A pre-norm-free stack X + P X W + 1 b^T: every path is a product of matrices that can be written down."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

        def forward(self, hidden_states: Tensor) -> Tensor:
            q, k, v = self.attention_qkv(hidden_states).chunk(3, -1)
            mixed = torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
            return hidden_states + self.out(mixed.squeeze(1))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.attention_blocks:
                x = block(x)
            return x

    model, x = Stack().double(), torch.randn(1, 9, 6, dtype=torch.float64)
    steps, state = [], x[0]
    with torch.no_grad():
        for block in model.attention_blocks:
            q, k, _ = block.attention_qkv(state).chunk(3, -1)
            p = torch.softmax(q @ k.mT / 6**0.5, -1)
            w = block.attention_qkv.weight[12:].mT @ block.out.weight.mT
            # the value bias passes through attention, the output bias does not
            steps.append((p, w, block.attention_qkv.bias[12:] @ block.out.weight.mT, block.out.bias))
            state = block(state[None])[0]
        groups = [torch.zeros(9, 6, dtype=torch.float64) for _ in range(4)]
        sources = [(x[0], 0, 0)]
        for layer, (_, _, through, past) in enumerate(steps):
            sources += [(through.expand(9, 6), layer + 1, 1), (past.expand(9, 6), layer + 1, 0)]
        for source, start, length in sources:
            for path in itertools.product((0, 1), repeat=3 - start):
                y = source
                for (p, w, _, _), attends in zip(steps[start:], path, strict=True):
                    y = p @ y @ w if attends else y
                groups[length + sum(path)] += y
    found = by_length(model, {"x": x})
    expected = [((g * state).sum() / state.square().sum()).item() for g in groups]
    assert found["share"] == pytest.approx(expected, abs=1e-12)
    assert found["sum_error"] < 1e-12


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_paths_nor_ablations(side: str) -> None:
    model, batch = ALL["bert"]()
    ids, model = batch["input_ids"], sharpen(model)
    real = torch.arange(40) >= 15 if side == "left" else torch.arange(40) < 25
    keep, places = real.long()[None], (real.long().cumsum(0) - 1).clamp(min=0)[None]
    padded = {"input_ids": ids, "attention_mask": keep, "position_ids": places}
    alone = {"input_ids": ids[:, real]}
    for name, curve in collapse_curves(model, alone)["curves"].items():
        assert collapse_curves(model, padded)["curves"][name] == pytest.approx(curve, rel=1e-9)
    for name in ("share", "norm", "relative_residual"):
        assert by_length(model, padded)[name] == pytest.approx(by_length(model, alone)[name], rel=1e-9)


def test_a_model_whose_parts_do_not_add_up_says_so() -> None:
    model, batch = ALL["t5"]()
    found = by_length(model.eval(), batch)
    assert not found["supported"]
    assert "T5Model" in found["why"]


def test_ablations_equal_a_bert_written_by_hand() -> None:
    model, batch = ALL["bert"]()
    model = sharpen(model)
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        start = double.embeddings(batch["input_ids"])

        def curve(skip: bool, mlp: bool) -> list[float]:
            x, found = start, [relative_residual(start[0]).item()]
            for layer in double.encoder.layer:
                attended = layer.attention.self(x)[0]
                out = layer.attention.output.dense(attended)
                x = layer.attention.output.LayerNorm(out + x if skip else out)
                if mlp:
                    x = layer.output.LayerNorm(layer.output.dense(layer.intermediate(x)) + x)
                found.append(relative_residual(x[0]).item())
            return found

        found = collapse_curves(model, batch)["curves"]
        assert found["all"] == pytest.approx(curve(True, True), rel=1e-9)
        assert found["no attention skip"] == pytest.approx(curve(False, True), rel=1e-9)
        assert found["no MLP"] == pytest.approx(curve(True, False), rel=1e-9)
        assert found["pure attention"] == pytest.approx(curve(False, False), rel=1e-9)


def test_ablations_equal_a_gpt2_written_by_hand() -> None:
    model, batch = ALL["gpt2"]()
    double = copy.deepcopy(sharpen(model)).double()
    ids = batch["input_ids"]
    with torch.no_grad():
        start = double.wte(ids) + double.wpe(torch.arange(ids.shape[1]))

        def curve(skip: bool, mlp: bool) -> list[float]:
            x, found = start, [relative_residual(start[0]).item()]
            for block in double.h:
                mask = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
                attended = block.attn(block.ln_1(x), attention_mask=mask[None, None])[0]
                x = x + attended if skip else attended
                if mlp:
                    x = x + block.mlp(block.ln_2(x))
                found.append(relative_residual(x[0]).item())
            return found

        found = collapse_curves(model, batch)["curves"]
        for name, switches in zip(found, ((True, True), (False, True), (True, False), (False, False)), strict=True):
            assert found[name] == pytest.approx(curve(*switches), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "vit", "torch_encoder"])
def test_switching_everything_off_changes_the_curve(family: str) -> None:
    model, batch = ALL[family]()
    found = collapse_curves(model.eval(), batch)
    assert found["supported"], found
    assert found["curves"]["pure attention"][-1] < 0.7 * found["curves"]["all"][-1]
    assert not any(m._forward_hooks for m in model.modules())


def test_unknown_blocks_are_said_to_be_unsupported() -> None:
    model, batch = ALL["t5"]()
    found = collapse_curves(model.eval(), batch)
    assert not found["supported"]
    assert "T5Block" in found["why"]


def wav2vec2() -> tuple[Any, dict[str, Tensor]]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **CONVOLUTIONS
    )
    return Wav2Vec2Model(config), {"input_values": torch.randn(1, 4000)}


@pytest.mark.parametrize("build", [ALL["whisper"], wav2vec2], ids=["whisper", "wav2vec2"])
def test_ablations_equal_an_encoder_of_speech_written_by_hand(
    build: Callable[[], tuple[Any, dict[str, Tensor]]],
) -> None:
    """Of an encoder and a decoder, the curves are those of the encoder."""
    model, batch = build()
    whisper = "input_features" in batch
    double: Any = copy.deepcopy(sharpen(model)).double()
    layers = double.encoder.layers
    given: list[Tensor] = []
    layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: given.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        double(**{name: x.double() if x.is_floating_point() else x for name, x in batch.items()})

        def curve(skip: bool, mlp: bool) -> list[float]:
            x, found = given[0], [relative_residual(given[0][0]).item()]
            for layer in layers:
                if whisper:  # norms first
                    out = layer.self_attn(hidden_states=layer.self_attn_layer_norm(x), attention_mask=None)[0]
                    x = x + out if skip else out
                    x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))) if mlp else x
                else:
                    out = layer.attention(x, attention_mask=None)[0]
                    x = layer.layer_norm(x + out if skip else out)
                    x = layer.final_layer_norm(x + layer.feed_forward(x) if mlp else x)
                found.append(relative_residual(x[0]).item())
            return found

        found = collapse_curves(model, batch)
    assert found["other_blocks"] == (["decoder.layers"] if whisper else [])
    for name, switches in zip(CURVES, ((True, True), (False, True), (True, False), (False, False)), strict=True):
        assert found["curves"][name] == pytest.approx(curve(*switches), rel=1e-6)


def test_sequence_first_has_the_curves_of_batch_first() -> None:
    """(n, b, d): the first of three sequences is cut from the second axis.  Path lengths are not built for it."""
    torch.manual_seed(0)
    batch_first = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2).eval()
    with pytest.warns(UserWarning, match="batch_first"):
        sequence_first = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 2).eval()
    sequence_first.load_state_dict(batch_first.state_dict())
    x = torch.randn(3, 7, 16)
    expected, found = collapse_curves(batch_first, x)["curves"], collapse_curves(sequence_first, x.transpose(0, 1))
    for name, curve in expected.items():
        assert found["curves"][name] == pytest.approx(curve)
    assert "not laid out as (batch, sequence, width)" in by_length(sequence_first, x.transpose(0, 1))["why"]


def test_a_single_token_does_not_become_equal_to_others() -> None:
    model, _ = ALL["torch_encoder"]()
    x = torch.randn(2, 1, 32)
    found = with_advice(with_depth(examine(model, [x]), model, x))
    assert not found.ablations["supported"]
    assert [piece["topic"] for piece in found.advice] == ["nothing stands out"]
    assert not any("equal" in line or "Differences" in line for line in found.headline)
    assert found.headline[0].startswith("8 heads, judged on 2 texts of 1 token: ")


@pytest.mark.parametrize("form", ["tensor", "positions", "keywords"])
def test_a_batch_is_passed_as_the_model_takes_it(form: str) -> None:
    """The argument of nn.TransformerEncoder is called src."""
    model, batch = ALL["torch_encoder"]()
    x = batch["src"]
    forms = {"tensor": x, "positions": [x], "keywords": batch}
    found = with_depth(examine(model, [forms[form]]), model, forms[form])
    assert found.ablations["supported"], found.ablations
    assert found.paths["supported"], found.paths


@pytest.mark.parametrize("error", [TypeError("forward() got an unexpected argument"), MemoryError()])
def test_a_failure_in_depth_does_not_lose_the_measurement(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ALL["bert"]()
    measured = examine(model, [batch])

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("headwise.examination.measure.depth.run_model", fail)
    found = with_depth(measured, model, batch)
    assert found.records == measured.records
    assert not found.ablations["supported"]
    assert f"BertModel failed with {type(error).__name__}" in found.ablations["why"]
    assert found.paths["supported"]  # measured on its own
