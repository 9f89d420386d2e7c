"""The audit on models of every kind: what applies, what is said about the rest, and that the model stays as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.cli.main import main
from headwise.errors import HeadwiseError
from headwise.ledger.model_audit.attention_forms import FORMS, ROWS
from headwise.ledger.model_audit.audit_model import CHECKS, STEPS
from headwise.ledger.model_audit.audited_model import AuditedModel
from headwise.ledger.model_audit.cached_decoding import AFTER_PADDING, BY_CHUNK, BY_TOKEN
from headwise.ledger.model_audit.causality import GRADIENT, PERTURBATION, REACH
from headwise.ledger.model_audit.declared import DeclaredReach, declared_causal, declared_reaches
from headwise.ledger.model_audit.layer_reach import WINDOWS
from headwise.ledger.model_audit.measurements import (
    BRAIN,
    COLLAPSE,
    HALF,
    HEADROOM,
    PERMUTATION,
    TRANSLATION,
)
from headwise.ledger.model_audit.promise import ModelAudit, Standing
from headwise.ledger.model_audit.repeated_runs import BATCH, DETERMINISTIC, FINITE, LEFT, RIGHT
from headwise.outputs import json_text
from tests.models.tiny_models import TRANSFORMERS, bert, llama, sharpen, vit
from tests.models.tiny_tokenizer import tokenizer_of, words

NAMES = [FINITE, DETERMINISTIC, *(name for names, _, _ in CHECKS for name in names)]


def tiny(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return sharpen(build()[0])


def standing(audit: ModelAudit, name: str) -> str:
    return audit[name].standing.value


def encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_promise_is_spoken_of_and_none_is_broken(family: str) -> None:
    audit = headwise.verify(tiny(TRANSFORMERS[family]))
    assert [promise.name for promise in audit.promises] == NAMES
    assert audit.violated == ()
    for name in (FINITE, DETERMINISTIC, ROWS, FORMS, BATCH):
        assert standing(audit, name) == "kept", audit[name]
    for promise in audit.promises:
        assert promise.sentence.endswith(".")
        silent = promise.standing in (Standing.NOT_TRIED, Standing.NOT_APPLICABLE)
        assert (promise.measured is None) == silent
        if silent:
            assert promise.sentence.startswith(("Not tried: ", "Does not apply: "))


def test_what_applies_to_a_decoder_an_encoder_and_a_vision_model() -> None:
    decoder, text, image = (headwise.verify(tiny(build)) for build in (llama, bert, vit))
    assert (decoder.kind, text.kind, image.kind) == ("decoder", "encoder", "model")
    caches = (BY_TOKEN, BY_CHUNK, AFTER_PADDING)
    for name in (PERTURBATION, GRADIENT, LEFT, RIGHT, *caches):
        assert standing(decoder, name) == "kept"
        assert standing(image, name) == "does not apply"
    assert standing(text, PERTURBATION) == standing(text, GRADIENT) == "measured"
    assert standing(text, RIGHT) == "kept"
    assert all(standing(text, name) == "does not apply" for name in caches)
    assert decoder[REACH].measured == 32
    assert "only differences" in decoder[TRANSLATION].sentence
    assert "absolute" in text[TRANSLATION].sentence
    assert standing(text, COLLAPSE) == "measured"
    assert standing(decoder, COLLAPSE) == "does not apply"
    for audit in (decoder, text, image):
        half, brain, largest = (audit[name].measured or 0.0 for name in (HALF, BRAIN, HEADROOM))
        assert 0 < half < 0.1
        assert half < brain < 0.5
        assert 0 < largest < 65504


def test_outputs_as_large_as_the_weights_are_not_taken_for_weights() -> None:
    """Eight tokens, heads of width eight: P and P V have equally many entries."""
    assert standing(headwise.verify(tiny(bert), length=8), ROWS) == "kept"


def test_a_loss_is_not_compared() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = self.encoder(x)
            return {"loss": out.mean((0, 1, 2))[None], "out": out}

    assert headwise.verify(WithLoss().eval(), [torch.randn(3, 9, 16)]).violated == ()


def test_a_model_that_is_not_causal_though_it_should_be() -> None:
    audit = headwise.verify(tiny(bert), causal=True)
    assert {PERTURBATION, GRADIENT} <= set(audit.violated)
    assert "sees position" in audit[GRADIENT].where


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_plain_module_with_a_batch(batch_first: bool) -> None:
    model, x = encoder(batch_first=batch_first), torch.randn(4, 9, 16)
    audit = headwise.verify(model, [x if batch_first else x.transpose(0, 1)])
    assert audit.violated == ()
    for name in (FORMS, ROWS, BATCH):
        assert standing(audit, name) == "kept", audit[name]
    assert audit.inputs == "4 sequences of the given batches"
    assert "no position is used" in audit[PERMUTATION].sentence
    assert audit[REACH].measured == 9
    assert "which is right unless" in audit[PERTURBATION].sentence


def test_a_config_does_not_make_a_model_of_transformers() -> None:
    class Configured(nn.Module):
        """Tokens in an argument of its own, as in many small code bases."""

        def __init__(self) -> None:
            super().__init__()
            self.config = {"layers": 2}
            self.embed, self.encoder = nn.Embedding(50, 16), encoder()

        def forward(self, idx: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
            return self.encoder(self.embed(idx), mask=mask)

    torch.manual_seed(0)
    audit = headwise.verify(Configured().eval(), [torch.randint(50, (3, 9))], causal=True)
    assert audit.violated == ()
    for name in (PERTURBATION, GRADIENT, FORMS, ROWS, BATCH):
        assert standing(audit, name) == "kept", audit[name]


class Causal(nn.Module):
    """An encoder of torch with a mask, which an option leaves out."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.encoder, self.masked = encoder(), masked

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask) if self.masked else self.encoder(x)


@pytest.mark.parametrize("masked", [True, False])
def test_a_plain_module_that_is_said_to_be_causal(masked: bool) -> None:
    audit = headwise.verify(Causal(masked=masked).eval(), [torch.randn(2, 7, 16)], causal=True)
    assert set(audit.violated) == (set() if masked else {PERTURBATION, GRADIENT})


def test_padding_of_a_plain_module() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
            return self.encoder(x)

    batch = [torch.randn(3, 9, 16)]
    assert standing(headwise.verify(encoder(), batch), RIGHT) == "kept"
    audit = headwise.verify(Deaf().eval(), batch)
    assert audit.violated == (RIGHT, LEFT)
    assert "attended to though it is masked" in audit[RIGHT].sentence


def test_batch_statistics_reach_other_sequences() -> None:
    """A norm without running statistics takes them from the batch, also in eval mode."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.norm = encoder(), nn.BatchNorm1d(16, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.encoder(x).mT).mT

    audit = headwise.verify(Normed().eval(), [torch.randn(3, 9, 16)])
    assert audit.violated == (BATCH,)


def test_a_batch_of_one_says_what_is_missing() -> None:
    audit = headwise.verify(encoder(), [torch.randn(1, 9, 16)])
    assert audit[BATCH].sentence == "Not tried: the batch has one sequence; give two or more."


def test_bfloat16_is_too_coarse_and_says_so() -> None:
    audit = headwise.verify(nn.Module.to(tiny(llama), torch.bfloat16))
    assert audit.violated == ()
    blunt = [promise for promise in audit.promises if "rounding alone changes" in promise.sentence]
    assert blunt
    assert all(promise.standing is Standing.NOT_TRIED and "float32" in promise.sentence for promise in blunt)
    assert standing(audit, GRADIENT) == "kept"  # exactly zero


def test_the_floor_is_that_of_rounding() -> None:
    """Against the difference from the same model in float64."""
    for build in (bert, llama):
        model = tiny(build)
        audited = AuditedModel(model, {"input_ids": torch.randint(3, 90, (3, 20))}, causal=None, seed=0)
        double = AuditedModel(copy.deepcopy(model).double(), audited.batch, causal=None, seed=0)
        error = audited.distance(audited.reference, double.reference)
        assert error / 4 < audited.floor < 30 * error
        assert double.floor < 1e-6 * audited.floor or build is llama  # its norms compute in float32


def test_the_model_is_afterwards_as_it_was() -> None:
    model = tiny(llama)
    model.layers[0].train()
    handle = model.norm.register_forward_hook(lambda *x: None)
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()

    def facts() -> tuple:
        modules = list(model.modules())
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
        return [m.training for m in modules], hooks, model.config._attn_implementation

    before = facts()
    headwise.verify(model)
    assert facts() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    handle.remove()


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    model = tiny(llama)

    def stop(what: str, done: int, total: int | None) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        headwise.verify(model, progress=stop)
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_windows_of_real_families() -> None:
    """Mistral with its window, and with the mask of another model."""
    from transformers import MistralConfig, MistralModel
    from transformers.masking_utils import create_causal_mask
    from transformers.models.mistral import modeling_mistral

    config = MistralConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = MistralModel(config).eval()
    audit = headwise.verify(model)
    assert standing(audit, WINDOWS) == "kept"
    assert audit[REACH].measured == 11  # two layers of six
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_mistral, "create_sliding_window_causal_mask", create_causal_mask)
        audit = headwise.verify(model)
    assert WINDOWS in audit.violated
    assert BY_TOKEN in audit.violated  # its cache forgets what the layer still sees
    assert audit[WINDOWS].where.startswith("layers.0, position ")
    assert "--length 22" in headwise.verify(model, length=6)[WINDOWS].sentence


def test_padding_that_a_real_family_attends_to() -> None:
    from transformers.models.bert import modeling_bert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_bert, "create_bidirectional_mask", lambda *args, **kwargs: None)
        audit = headwise.verify(tiny(bert))
    assert audit.violated == (RIGHT, LEFT)


def test_what_a_config_declares() -> None:
    from types import SimpleNamespace as Config

    sliding = DeclaredReach("sliding", 4)
    assert list(sliding.keys(9, 12, causal=True)) == [6, 7, 8, 9]
    assert list(sliding.keys(9, 12, causal=False)) == [5, 6, 7, 8, 9, 10, 11]
    assert list(DeclaredReach("chunked", 4).keys(9, 12, causal=True)) == [8, 9]
    assert list(DeclaredReach("full").keys(2, 12, causal=True)) == [0, 1, 2]
    assert declared_reaches(Config(num_hidden_layers=2, sliding_window=4)) == [sliding] * 2
    assert declared_reaches(Config(num_hidden_layers=2, sliding_window=4, use_sliding_window=False)) == []
    assert declared_reaches(Config(attention_layers=["global", "local"], window_size=4)) == [
        DeclaredReach("full"),
        sliding,
    ]
    types = ["full_attention", "sliding_attention", "linear_attention"]
    assert declared_reaches(Config(layer_types=types, sliding_window=4)) == [
        DeclaredReach("full"),
        sliding,
        DeclaredReach("unknown"),
    ]
    assert declared_causal(nn.Linear(1, 1)) is None
    assert declared_causal(tiny(llama)) is True
    assert declared_causal(tiny(bert)) is False


def test_texts_and_lengths() -> None:
    model = tiny(llama)
    audit = headwise.verify(model, texts=[words(12, 0), words(10, 1)], tokenizer=tokenizer_of(99))
    assert audit.violated == ()
    assert audit.inputs == "2 texts of 12 tokens"
    assert headwise.verify(model, length=12)[REACH].measured == 12


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"batches": torch.randn(2, 3)}, "list of batches"),
        ({"batches": []}, "at least one"),
        ({"batches": [torch.randn(2, 3)], "texts": ["a"]}, "not both"),
        ({"length": 1 << 20}, "positions, but length is"),
        ({"claim": "S1.bias"}, "leave them out for a model"),
    ],
)
def test_errors_say_what_to_do(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(HeadwiseError, match=part):
        headwise.verify(tiny(llama), **arguments)


def test_options_about_models_need_one() -> None:
    with pytest.raises(HeadwiseError, match="are about a model"):
        headwise.verify(length=12)
    with pytest.raises(HeadwiseError, match="give a torch module"):
        headwise.verify("minilm")
    with pytest.raises(HeadwiseError, match="what it takes is not known"):
        headwise.verify(nn.Linear(3, 3))


def test_a_model_without_a_cache_is_not_said_to_break_with_one() -> None:
    audit = headwise.verify(nn.Embedding(9, 4), [torch.randint(9, (2, 6))], causal=True)
    cached = [promise for promise in audit.promises if promise.name.startswith("cache")]
    assert [promise.sentence for promise in cached] == ["Does not apply: it takes no cache."] * 3


def test_the_result_is_a_value_with_a_text_and_json() -> None:
    done: list[tuple[str, int, int | None]] = []
    audit = headwise.verify(tiny(bert), progress=lambda *step: done.append(step))
    assert done == [("trying promises", step, STEPS) for step in range(1, STEPS + 1)]
    facts = json.loads(json_text(audit.to_json()))
    assert [promise["name"] for promise in facts["promises"]] == NAMES
    assert facts["violated"] == []
    assert facts["promises"][0]["standing"] == "kept"
    assert repr(audit) == f"ModelAudit(BertModel: {audit.summary})"
    assert str(audit).splitlines()[0] == "BertModel: encoder, float32, 3 sequences of 32 random tokens"
    with pytest.raises(KeyError, match="the promises are finite"):
        audit["nothing"]


def build_good() -> tuple[nn.Module, list[Tensor]]:
    return encoder(), [torch.randn(3, 9, 16)]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spec, out = f"python:{__name__}:build_good", tmp_path / "audit.json"
    assert main(["verify", spec, "--quiet", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "batch = single" in printed
    assert "cache, token by token" in printed
    assert main(["verify", spec, "--json", "--causal", "yes"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["violated"] == [PERTURBATION, GRADIENT]
    assert [x["name"] for x in json.loads(out.read_text())["promises"]] == NAMES
    assert main(["verify", spec, "--quiet", "--causal", "yes"]) == 1
    assert "Broken: causality" in capsys.readouterr().out


def test_a_text_for_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tiny(bert).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--text", "alice"]) == 2
    assert "leave out --text" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["minilm", "--claim", "S1.bias"], "--claim would have no effect, because MODEL is given"),
        (["--length", "16"], "--length would have no effect, because no MODEL is given"),
        (["minilm", "--length", "4"], "--length is 4; it must be at least 8"),
        (["no/such/model"], "there is no directory"),
    ],
)
def test_the_command_refuses_what_has_no_effect(arguments: list[str], part: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["verify", *arguments]) == 2
    assert part in capsys.readouterr().err


class CausalStack(nn.Module):
    """Causal attention over an embedding table; with `leak`, the mean over all positions is added to every one."""

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv, self.leak = nn.Embedding(30, 16), nn.Linear(16, 48), leak

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.leak * x.mean(1, keepdim=True)


@pytest.mark.parametrize(("leak", "expected"), [(0.0, "kept"), (1e-3, "VIOLATED")])
def test_a_model_without_config_whose_attention_is_causal_promises_it(leak: float, expected: str) -> None:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(30, (2, 12))}
    audit = headwise.verify(CausalStack(leak), [batch])
    assert {standing(audit, name) for name in (PERTURBATION, GRADIENT)} == {expected}


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_short_sequences_are_judged_or_said_to_be_too_short(length: int) -> None:
    audit = headwise.verify(tiny(llama), length=length)
    assert audit.violated == ()
    assert standing(audit, TRANSLATION) == ("not tried" if length < 5 else "measured")
    assert standing(audit, PERMUTATION) == ("not tried" if length < 2 else "measured")
