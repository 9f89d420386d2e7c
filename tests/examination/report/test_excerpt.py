"""The excerpt of a page against the dense attention of the model, computed by itself in float64."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from headwise.examination.report import excerpt as module
from headwise.examination.report.excerpt import make_excerpt
from headwise.models.intercept import intercept
from tests.models.tiny_models import ALL, sharpen


def attention(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """(heads, m, n) of every call of an unpadded text, from q and k, one score at a time."""
    found = []

    def see(call: Any) -> None:
        q, k = call.q[0].double(), call.k[0].double()
        scores = torch.einsum("hik,hjk->hij", q, k) * call.scale
        if call.mask.attn_bias is not None:
            scores = scores + call.mask.attn_bias.double().reshape(-1, *scores.shape[-2:])
        if call.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        found.append(torch.softmax(scores, -1).numpy())

    with torch.no_grad(), intercept(model, see):
        model(**batch)
    return found


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8)


def whole_numbers(text: str) -> list[int]:
    found, total = [], 0
    for byte in unpacked(text).tolist():
        total += byte
        if byte < 255:
            found.append(total)
            total = 0
    return found


def links(stored: dict[str, str], n: int) -> np.ndarray:
    """(queries, n) weights, nan where none is stored."""
    counts, gaps, weights = whole_numbers(stored["counts"]), whole_numbers(stored["gaps"]), unpacked(stored["weights"])
    found, at = np.full((len(counts), n), np.nan), 0
    for query, count in enumerate(counts):
        key = 0
        for _ in range(count):
            key += gaps[at]
            found[query, key] = (weights[at] / 255) ** 2
            at += 1
    assert at == len(gaps) == len(weights)
    return found


def cells(p: np.ndarray, rows: int, columns: int) -> np.ndarray:
    m, n = p.shape
    return np.array(
        [
            [
                p[r * m // rows : (r + 1) * m // rows, c * n // columns : (c + 1) * n // columns].mean()
                for c in range(columns)
            ]
            for r in range(rows)
        ]
    )


@pytest.mark.parametrize("length", [40, 101, 300])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_maps_are_means_over_cells(family: str, length: int) -> None:
    torch.manual_seed(0)
    model = sharpen(ALL[family]()[0])
    batch = {"input_ids": torch.randint(99, (2, length))}
    found = make_excerpt(model, batch, None)
    true = attention(model, {"input_ids": batch["input_ids"][:1]})
    for site, p in zip(found["sites"], true, strict=True):
        assert (site["queries"], site["keys"]) == p.shape[1:] == (length, length)
        assert site["rows"] == site["columns"] == (length if length <= module.SINGLE else module.CELLS)
        for h, text in enumerate(site["maps"]):
            shown = unpacked(text).reshape(site["rows"], site["columns"]) / 255
            expected = np.sqrt(cells(p[h], site["rows"], site["columns"]) / site["top"][h])
            assert np.abs(shown - expected).max() < 0.5 / 255 + 2e-3


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_every_weight_above_the_threshold_is_stored_and_no_other(family: str, monkeypatch) -> None:
    torch.manual_seed(0)
    model = sharpen(ALL[family]()[0], 30)
    monkeypatch.setattr(module.Links.__init__, "__defaults__", (20_000,))
    batch = {"input_ids": torch.randint(99, (1, 300))}
    found = make_excerpt(model, batch, None)
    stored, size = 0, 0
    assert found["linked"] == 300
    for site, p in zip(found["sites"], attention(model, batch), strict=True):
        for h, entry in enumerate(site["links"]):
            shown = links(entry, site["keys"])
            known = ~np.isnan(shown)
            margin = 1e-5  # float32 against float64
            assert (p[h][known] > found["threshold"] - margin).all()
            assert (p[h][~known] <= found["threshold"] + margin).all()
            assert np.abs(np.sqrt(shown[known]) - np.sqrt(p[h][known])).max() < 0.5 / 255 + 1e-3
            stored += known.sum()
            size += sum(len(unpacked(text)) for text in entry.values())
    assert 17_000 < size <= 20_000  # the budget is used
    assert stored > 5_000


def test_long_gaps_and_many_links_survive() -> None:
    kept = module.Links(limit=100_000)
    kept.next_site(1)
    p = torch.zeros(1, 3, 2000)
    p[0, 0, [0, 255, 1999]] = torch.tensor([0.5, 0.25, 0.25])
    p[0, 2, :600] = 1 / 600
    kept.add(p[:, :2], 0)
    kept.add(p[:, 2:], 2)
    shown = links(kept.strongest().encode(0, 3), 2000)
    assert np.flatnonzero(~np.isnan(shown[0])).tolist() == [0, 255, 1999]
    assert np.isnan(shown[1]).all()
    assert (~np.isnan(shown[2])).sum() == 600
    assert shown[0, 0] == pytest.approx(0.5, abs=0.003)


def test_a_short_text_needs_no_links_and_a_long_one_has_some_queries() -> None:
    torch.manual_seed(0)
    model = sharpen(ALL["bert"]()[0])
    short = make_excerpt(model, {"input_ids": torch.randint(99, (1, 60))}, None, own=True)
    assert "threshold" not in short
    assert "links" not in short["sites"][0]
    assert short["own"] is True
    many = module.Links(limit=1000)
    many.next_site(50)
    many.add(torch.full((50, 100, 4), 0.25), 0)
    assert many.strongest().queries == 5  # four bytes a query for each of 50 heads


def test_names_of_queries_and_keys() -> None:
    """A decoder has its own names, cross-attention both; padding has none."""
    torch.manual_seed(0)
    model, batch = ALL["t5"]()

    def name(x: Any) -> list[list[str]]:
        return [[f"t{i}" for i in row.tolist()] for row in x["input_ids"]]

    found = make_excerpt(model.eval(), batch, name)
    encoder, decoder = name(batch)[0], name({"input_ids": batch["decoder_input_ids"]})[0]
    assert found["tokens"] == encoder
    by_name = {site["site"]: site for site in found["sites"]}
    own = by_name["decoder.block.0.layer.0.SelfAttention"]
    cross = by_name["decoder.block.0.layer.1.EncDecAttention"]
    assert "key_tokens" not in by_name["encoder.block.0.layer.0.SelfAttention"]
    assert own["query_tokens"] == own["key_tokens"] == decoder
    assert (cross["query_tokens"], cross["key_tokens"]) == (decoder, encoder)

    whisper, heard = ALL["whisper"]()
    frames = [f"{i} s" for i in range(40)]
    sites = make_excerpt(whisper.eval(), heard, lambda x: [frames])["sites"]
    decoding = [site for site in sites if "decoder" in site["site"]]
    assert [site["query_tokens"] for site in decoding] == [[]] * 4
    assert [site["key_tokens"] for site in decoding] == [[], frames] * 2

    bert = sharpen(ALL["bert"]()[0])
    ids = torch.randint(99, (1, 12))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]])
    padded = make_excerpt(bert, {"input_ids": ids, "attention_mask": mask}, name)
    assert padded["tokens"] == [f"t{i}" for i in ids[0, 2:10].tolist()]
    assert padded["sites"][0]["keys"] == 8
