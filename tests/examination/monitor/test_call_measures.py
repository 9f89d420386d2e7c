"""Measures of one attention call against a dense float64 computation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.examination.monitor.call_measures import HeadSample, measure_call
from headwise.models.intercept import AttentionCall, intercept
from headwise.operators._kernels import limits


class Attend(nn.Module):
    """One attention call with the arguments it is given."""

    def forward(self, *args, **kwargs) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def seen(*args, **kwargs) -> AttentionCall:
    calls: list[AttentionCall] = []
    module = Attend()
    with intercept(module, calls.append):
        module(*args, **kwargs)
    return calls[0]


def dense(q, k, mask=None, bias=None, scale=None, queries=None) -> dict[str, Tensor]:
    """By definition: every row of every sequence, float64; `mask` (b, h, m, n), `queries` (b, m) that count."""
    q, k = q.double(), k.double()
    b, h, m, width = q.shape
    k = k.repeat_interleave(h // k.shape[1], dim=1)
    s = (q @ k.mT) * (1 / math.sqrt(width) if scale is None else scale)
    s = s if bias is None else s + bias.double()
    mask = torch.ones_like(s, dtype=torch.bool) if mask is None else mask.expand_as(s)
    queries = torch.ones(b, m, dtype=torch.bool) if queries is None else queries
    names = ("max_logit", "entropy", "entropy_share", "row_maximum", "sink_mass")
    found: dict[str, list] = {name: [] for name in names}
    lowest = []
    for head in range(h):
        logits, entropies, shares, maxima, sinks = [], [], [], [], []
        for sequence in range(b):
            rows = []
            for i in range(m):
                visible = s[sequence, head, i][mask[sequence, head, i]]
                if len(visible) == 0 or not queries[sequence, i]:
                    continue
                p = torch.softmax(visible, 0)
                entropy = torch.special.entr(p).sum()
                logits.append(visible.max())
                entropies.append(entropy)
                maxima.append(p.max())
                rows.append(torch.zeros(s.shape[-1]).double().masked_scatter(mask[sequence, head, i], p))
                if len(visible) > 1:
                    shares.append(entropy / math.log(len(visible)))
            sinks.append(torch.stack(rows).mean(0).max())
        found["sink_mass"].append(sum(sinks) / len(sinks))
        found["max_logit"].append(max(logits))
        found["entropy"].append(sum(entropies) / len(entropies))
        found["entropy_share"].append(sum(shares) / len(shares))
        found["row_maximum"].append(sum(maxima) / len(maxima))
        lowest.append(min(shares))
    return {name: torch.stack(x) for name, x in found.items()} | {"lowest_entropy_share": torch.stack(lowest)}


def agree(sample: HeadSample, expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(getattr(sample, name).double(), value, rtol=tolerance, atol=tolerance, msg=name)


def all_rows(call: AttentionCall, **more) -> HeadSample:
    options = {"rows": None, "with_rank": False, "generator": torch.Generator().manual_seed(0)} | more
    sample = measure_call(call, **options)
    assert sample is not None
    return sample


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("entries", [1 << 19, 100], ids=["one block", "many blocks"])
@pytest.mark.parametrize("kind", ["full", "causal", "padding", "bias", "grouped", "window", "cross", "top left"])
def test_all_rows_agree_with_the_dense_definition(kind: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CACHE_ENTRIES", entries)
    b, h, m, n, width = 3, 4, 13, 13, 8
    m, n = {"cross": (7, 11), "top left": (9, 13)}.get(kind, (m, n))
    q, k, v = 3 * torch.randn(b, h, m, width), torch.randn(b, 2 if kind == "grouped" else h, n, width), torch.randn(1)
    v = torch.randn_like(k)
    arguments, facts = {}, {}
    if kind in ("causal", "grouped", "top left"):
        arguments, facts = {"is_causal": True}, {"mask": torch.ones(m, n, dtype=torch.bool).tril()}
    if kind == "grouped":
        arguments["enable_gqa"] = True
    if kind == "padding":
        real = torch.arange(n) < torch.tensor([[13], [5], [9]])
        arguments = {"attn_mask": real[:, None, None].expand(b, 1, m, n)}
        facts = {"mask": real[:, None, None], "queries": real}
    if kind == "bias":
        arguments = {"attn_mask": torch.randn(1, h, m, n), "scale": 0.7}
        facts = {"bias": arguments["attn_mask"], "scale": 0.7}
    if kind == "window":
        near = (torch.arange(m)[:, None] - torch.arange(n)).abs() <= 2
        near[4] = False  # a query that attends to nothing
        arguments, facts = {"attn_mask": near}, {"mask": near}
    agree(all_rows(seen(q, k, v, **arguments)), dense(q, k, **facts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_single(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, 2, 20, 16).to(dtype) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(all_rows(seen(q, k, k, is_causal=True)), dense(q, k, torch.ones(20, 20, dtype=torch.bool).tril()), 1e-4)


def test_logits_beyond_half_precision_are_finite() -> None:
    q = torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16)
    assert all_rows(seen(q, q, q)).max_logit.item() == pytest.approx(4 * 300**2 / 2)


def test_sampled_rows_are_unbiased_and_the_largest_logit_is_exact() -> None:
    q, k = 2 * torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 8)
    call = seen(q, k, k, is_causal=True)
    expected = all_rows(call)
    generator = torch.Generator().manual_seed(1)
    samples = [all_rows(call, rows=40, generator=generator) for _ in range(100)]
    for name in ("entropy", "entropy_share", "row_maximum"):
        values = torch.stack([getattr(sample, name) for sample in samples])
        error = values.std(0) / 10
        assert (values.mean(0) - getattr(expected, name)).abs().le(4 * error).all(), name
        assert (values.std(0) > 0).all()
    assert all(torch.equal(sample.max_logit, expected.max_logit) for sample in samples)
    assert all((sample.lowest_entropy_share >= expected.lowest_entropy_share).all() for sample in samples)
    assert samples[0].weight == 40


def test_sink_mass_is_not_inflated_by_few_rows() -> None:
    n = 256
    shift = 30 * torch.eye(n).roll(1, 1)  # every query attends to another key
    sink = torch.zeros(n, n)
    sink[:, 7] = 12.0
    bias = torch.stack([shift, sink])[None].expand(4, -1, -1, -1)
    zero = torch.zeros(4, 2, n, 4)
    sample = all_rows(seen(zero, zero, zero, attn_mask=bias), rows=64)
    p = torch.softmax(bias[0].double(), -1).mean(-2)
    assert sample.sink_mass[0] < 0.01  # 1 / 16 by the largest mean of 16 rows
    assert sample.sink_mass[1].item() == pytest.approx(p[1, 7].item(), abs=1e-4)


@pytest.mark.parametrize("entries", [1 << 19, 100], ids=["all heads at once", "one head at a time"])
def test_effective_rank_of_few_rows_is_that_of_P(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CACHE_ENTRIES", entries)
    q, k = 2 * torch.randn(2, 3, 60, 8), torch.randn(2, 3, 60, 8)
    sample = all_rows(seen(q, k, k, is_causal=True), with_rank=True)
    hidden = torch.ones(60, 60, dtype=torch.bool).triu(1)
    scores = (q[0].double() @ k[0].double().mT / math.sqrt(8)).masked_fill(hidden, -math.inf)
    p = torch.softmax(scores, -1)
    share = torch.linalg.svdvals(p)
    share = share / share.sum(-1, keepdim=True)
    expected = torch.special.entr(share).sum(-1).exp()
    assert sample.effective_rank is not None
    torch.testing.assert_close(sample.effective_rank.double(), expected, rtol=1e-5, atol=0)


def test_effective_rank_is_of_at_most_128_rows_without_padding() -> None:
    x = torch.zeros(2, 1, 300, 4)
    real = torch.arange(300) < torch.tensor([[0], [200]])
    bias = (40 * torch.eye(300)).expand(2, 1, 300, 300).masked_fill(~real[:, None, None], -math.inf)
    sample = all_rows(seen(x, x, x, attn_mask=bias), with_rank=True)
    assert sample.effective_rank is not None
    assert sample.effective_rank.item() == pytest.approx(128, rel=1e-3)


def test_nothing_to_attend_to_is_no_measurement() -> None:
    x = torch.randn(1, 2, 5, 4)
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    assert measure_call(seen(x, x, x, attn_mask=hidden), rows=8, with_rank=True, generator=torch.Generator()) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_shows_in_its_head_only(bad: float) -> None:
    q = torch.randn(2, 3, 40, 4)
    q[1, 2, 17] = bad
    sample = all_rows(seen(q, q, q), rows=8, with_rank=True)
    assert sample.max_logit.isfinite().tolist() == [True, True, False]


def test_padding_may_hold_anything() -> None:
    q = torch.randn(1, 2, 10, 4)
    real = torch.arange(10) < 6
    clean = all_rows(seen(q, q, q, attn_mask=real.expand(1, 1, 10, 10)), with_rank=True)
    q[..., 6:, :] = math.nan
    dirty = all_rows(seen(q, q, q, attn_mask=real.expand(1, 1, 10, 10)), with_rank=True)
    for name in ("max_logit", "entropy", "row_maximum", "sink_mass", "effective_rank"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made while the mode is on."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.size = max([self.size, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors)])
        return out


@pytest.mark.parametrize("rows", [None, 256])
def test_no_n_by_n_tensor_exists(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CACHE_ENTRIES", 1 << 14)
    b, h, n = 2, 3, 600
    x = torch.randn(b, h, n, 4)
    call = seen(x, x, x, is_causal=True)
    with Largest() as largest:
        all_rows(call, rows=rows)
    assert largest.size < n * n / 8
    with Largest() as largest:
        all_rows(call, rows=16, with_rank=True)
    assert largest.size <= 2 * 128 * n < n * n / 2  # one head, in double precision


def test_two_calls_merge_into_one_larger_batch() -> None:
    q, k = torch.randn(3, 2, 12, 4), torch.randn(3, 2, 12, 4)
    both = all_rows(seen(q[:2], k[:2], k[:2])).merged(all_rows(seen(q[2:], k[2:], k[2:])))
    expected = dense(q, k)
    agree(both, expected)
    assert both.weight == 36
