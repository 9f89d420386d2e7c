"""Weights on repeated tokens and delimiters equal those read from a dense float64 P by loops over all pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.examination.measure import token_patterns
from headwise.examination.measure.head_measures import evaluate
from headwise.examination.measure.observe import observe
from headwise.examination.measure.streaming import stream
from headwise.examination.measure.token_patterns import (
    TokenPlaces,
    delimiter_tokens,
    delimiter_weights,
    token_weights,
)
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask
from tests.examination.measure.test_observe import attentions
from tests.models.tiny_models import ALL, sharpen

N = 24


def dense_numbers(p: Tensor, ids: list[int], visible: Tensor) -> dict[str, Tensor]:
    """Every number of p (h, n, n) by looking at all pairs; visible (n, n)."""
    n = len(ids)
    belongs = {
        "duplicate": lambda i, j: j != i and ids[j] == ids[i],
        "induction": lambda i, j: 1 <= j <= i and ids[j - 1] == ids[i],
        "previous_of_duplicate": lambda i, j: j + 1 < i and ids[j + 1] == ids[i],
    }
    numbers = {}
    for name, belongs_to in belongs.items():
        masses, chances = [], []
        for i in range(n):
            keys = [j for j in range(n) if visible[i, j] and belongs_to(i, j)]
            if keys:
                masses.append(p[:, i, keys].sum(-1))
                chances.append(len(keys) / int(visible[i].sum()))
        h = len(p)
        numbers[f"{name}_mass"] = torch.stack(masses).mean(0) if masses else torch.full((h,), math.nan)
        numbers[f"{name}_chance"] = torch.full((h,), sum(chances) / len(chances) if chances else math.nan)
    return {name: x.double() for name, x in numbers.items()}


def masks() -> dict[str, Mask]:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.rand(1, N, N, generator=generator) < 0.7
    pairs |= torch.eye(N, dtype=torch.bool)
    keys = torch.ones(1, N, dtype=torch.bool)
    keys[:, 5] = False
    return {
        "none": Mask(N, N),
        "causal": Mask(N, N, causal=True),
        "keys": Mask(N, N, key_mask=keys),
        "causal, keys": Mask(N, N, causal=True, key_mask=keys),
        "pairs": Mask(N, N, pair_mask=pairs),
        "bias": Mask(N, N, attn_bias=torch.randn(3, N, N, generator=generator)),
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("entries", [1 << 19, 40])
@pytest.mark.parametrize("tokens", [5, 1, 1000])
def test_patterns_equal_the_dense_ones(name: str, entries: int, tokens: int) -> None:
    """`tokens` different tokens: 1 makes every pair a repeated one, 1000 makes hardly any."""
    torch.manual_seed(tokens)
    mask, ids = masks()[name], torch.randint(tokens, (N,))
    q, k, v = (torch.randn(3, N, 8) * 2 for _ in range(3))
    scores = Scores(q, k, 0.35, mask)
    lse = stream(scores, v).log_sum_exp
    found = evaluate(token_weights(scores, lse, TokenPlaces.of(ids), entries=entries))
    p = torch.softmax(scores.to(torch.float64).dense(), -1)
    expected = dense_numbers(p, ids.tolist(), mask.rows(0, N).reshape(N, N))
    assert found.keys() == expected.keys()
    for measure, x in expected.items():
        torch.testing.assert_close(found[measure], x, rtol=0, atol=1e-6, equal_nan=True, msg=f"{measure}: {x}")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["none", "causal", "keys"])
@pytest.mark.parametrize("tokens", [5, 1, 1000])
def test_the_kernel_finds_the_same(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of keys is left to matrix products."""
    by_products: list[int] = []
    made = token_patterns._by_products
    monkeypatch.setattr(token_patterns, "_by_products", lambda *x: by_products.append(1) or made(*x))
    test_patterns_equal_the_dense_ones(name, 1 << 19, tokens)
    assert bool(by_products) == (name == "keys")


@pytest.mark.parametrize("name", ["none", "causal", "keys", "pairs"])
def test_delimiters_equal_the_dense_ones(name: str) -> None:
    torch.manual_seed(0)
    mask, delimiters = masks()[name], torch.rand(N) < 0.3
    q, k, v = (torch.randn(3, N, 8) * 2 for _ in range(3))
    scores = Scores(q, k, 0.35, mask)
    found = delimiter_weights(scores, stream(scores, v).received, TokenPlaces.of(torch.arange(N), delimiters))
    assert found is not None
    p, visible = torch.softmax(scores.to(torch.float64).dense(), -1), mask.rows(0, N).reshape(N, N).double()
    torch.testing.assert_close(found.mass, p[..., delimiters].sum(-1).mean(-1), rtol=0, atol=1e-6)
    uniform = visible / visible.sum(-1, keepdim=True)
    torch.testing.assert_close(
        found.chance, uniform[:, delimiters].sum(-1).mean().expand(3), rtol=0, atol=1e-6, check_dtype=False
    )


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5"])
def test_a_model_is_measured_like_its_own_weights(family: str) -> None:
    torch.manual_seed(0)
    model = sharpen(ALL[family]()[0])
    ids = torch.randint(3, 12, (1, 20))
    batch = {"input_ids": ids, **({"decoder_input_ids": ids.flip(-1)} if family == "t5" else {})}
    (found,) = observe(model, batch, with_spectra=False, token_names=lambda x: [["a", "."] * 10])
    start = 0
    for site, p in zip(found.sites, attentions(model, batch), strict=True):
        mine = {name: x[start : start + site.heads] for name, x in found.numbers.items()}
        start += site.heads
        if site.kind == "cross":
            assert mine["induction_mass"].isnan().all()
            continue
        tokens = (ids.flip(-1) if "decoder" in site.name else ids)[0].tolist()
        visible = torch.ones(20, 20).tril() if site.causal else torch.ones(20, 20)
        for name, expected in dense_numbers(p, tokens, visible).items():
            torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-5, msg=f"{site.name} {name}")
        if "decoder" in site.name:  # the names are those of the other tokens
            assert mine["delimiter_mass"].isnan().all()
        else:
            torch.testing.assert_close(mine["delimiter_mass"], p[..., 1::2].sum(-1).mean(-1), rtol=0, atol=1e-5)


def test_padding_does_not_count() -> None:
    torch.manual_seed(0)
    model = sharpen(ALL["bert"]()[0])
    ids = torch.randint(3, 12, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, 18:] = 0
    ids[1, 18:] = 0
    padded = observe(model, {"input_ids": ids, "attention_mask": mask}, with_spectra=False)[1]
    (alone,) = observe(model, {"input_ids": ids[1:, :18]}, with_spectra=False)
    for name in ("induction_mass", "induction_chance", "duplicate_mass", "previous_of_duplicate_mass"):
        torch.testing.assert_close(padded.numbers[name], alone.numbers[name], rtol=1e-4, atol=1e-6)


def test_without_token_ids_there_are_no_token_measures() -> None:
    for family in ("vit", "torch_encoder"):
        model, batch = ALL[family]()
        (found,) = observe(model.eval(), batch, with_spectra=False)
        assert not {"induction_mass", "duplicate_mass", "delimiter_mass"} & set(found.numbers)
        assert "distant_mass" in found.numbers


def test_without_strings_there_are_no_delimiters() -> None:
    model, batch = ALL["bert"]()
    (found,) = observe(model.eval(), batch, with_spectra=False)
    assert "induction_mass" in found.numbers
    assert "delimiter_mass" not in found.numbers


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["[CLS]", "the", "##ing", ",", "é", "[SEP]"], [1, 0, 0, 1, 0, 1]),  # WordPiece
        (["Ġthe", "Ġ", "Ċ", "âĢĶ", "Ã©", "Ġ-", "<|im_end|>"], [0, 1, 1, 1, 0, 1, 1]),  # bytes: a dash, an e with accent
        (["<s>", "▁the", "▁", "<0x0A>", "<0xC3>", "▁."], [1, 0, 1, 1, 0, 1]),  # sentencepiece
    ],
)
def test_delimiters_are_told_by_their_strings(names: list[str], expected: list[int]) -> None:
    assert delimiter_tokens(names).int().tolist() == expected


@pytest.mark.parametrize("causal", [True, False])
def test_distant_weight_of_an_average_is_the_chance_level(causal: bool) -> None:
    for n in (7, 24, 100):
        q, v = torch.zeros(2, n, 4), torch.randn(2, n, 4)
        scores = Scores(q, q, 1.0, Mask(n, n, causal=causal))
        found = evaluate(stream(scores, v))
        torch.testing.assert_close(found["distant_mass"], found["distant_chance"], rtol=1e-5, atol=1e-7)
        far = [[abs(i - j) > n / 4 and (j <= i or not causal) for j in range(n)] for i in range(n)]
        share = sum(sum(row) / (i + 1 if causal else n) for i, row in enumerate(far)) / n
        assert found["distant_chance"][0].item() == pytest.approx(share)
