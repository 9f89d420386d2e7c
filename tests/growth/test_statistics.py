"""M, Gram matrices and their sums over batches against autograd on explicit n x n scores, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.growth.layers.watch import ObservedPass, Watch, augmented
from headwise.growth.normal_equations import NormalMap
from headwise.growth.statistics import LayerStatistics
from headwise.nn import MultiHead, head_slices
from headwise.operators import AttentionOperator
from headwise.operators.softmax import softmax
from headwise.testing.counting import peak_bytes

F64 = torch.float64
B, N, WIDTH, HEADS = 3, 7, 6, 2


def case(kind: str, **options: Any) -> tuple[MultiHead, Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    layer = MultiHead(WIDTH, HEADS, key_width=(2, 3), **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    x = torch.randn(B, N, WIDTH, dtype=F64)
    key_mask = torch.ones(B, N, dtype=torch.bool)
    key_mask[0, 5:] = False
    masks: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "key_mask": {"key_mask": key_mask},
        "causal and padding": {"causal": True, "key_mask": key_mask},
        "mask": {"pair_mask": torch.rand(N, N) > 0.3},
        "attn_bias": {"attn_bias": torch.randn(N, N, dtype=F64)},
    }
    return layer, x, masks[kind]


def appended(observed: ObservedPass, build: Callable[..., AttentionOperator], *, bias: bool) -> Tensor:
    """M (h, d_q, d_k) from the fused kernel's own backward pass, without a formula of ours.

    q' = [q | x_q], k' = [k | x Z^T] with Z = 0 a leaf: then Z.grad = -M.  `build(q, k)` makes P from q.k / sqrt(width).
    """
    s = observed.scores
    x, context = augmented(observed.x, bias), observed.context
    h, k = observed.values.shape[1], s.q.shape[-1]
    wide = k + x.shape[-1]
    z = torch.zeros(h, x.shape[-1], context.shape[-1], dtype=x.dtype, requires_grad=True)
    b, m, n = x.shape[0], x.shape[1], context.shape[1]
    q = torch.cat([s.q * (s.scale * math.sqrt(wide)), x.unsqueeze(1).expand(b, h, m, -1)], -1)
    keys = torch.cat([s.k.expand(b, h, n, -1), math.sqrt(wide) * context.unsqueeze(1) @ z.mT], -1)
    (grad,) = torch.autograd.grad(build(q, keys)(observed.values), z, observed.gradient)
    return -grad


KINDS = ["plain", "causal", "key_mask", "causal and padding", "mask", "attn_bias"]


def allowed(masks: dict[str, Any]) -> Tensor:
    visible = torch.ones(B, 1, N, N, dtype=torch.bool)
    if masks.get("causal"):
        visible = visible.tril()
    if "key_mask" in masks:
        visible = visible & masks["key_mask"][:, None, None, :]
    return visible & masks["pair_mask"] if "pair_mask" in masks else visible


def by_hand(layer: MultiHead, x: Tensor, masks: dict[str, Any], weights: Tensor) -> Tensor:
    """-dL/dZ (b, h, d_q, d_k) with S = [x 1] Z x^T + bias written out: heads one by one, scores formed."""
    gradients = torch.zeros(B, HEADS, WIDTH + 1, WIDTH, dtype=F64)
    for b in range(B):
        outputs, zs = [], []
        for h in range(HEADS):
            rows, values = head_slices(layer.key_widths)[h], head_slices(layer.value_widths)[h]
            k = layer.key_widths[h]
            wq = torch.cat([layer.query.weight[rows].T, layer.query.bias[rows][None]]) / math.sqrt(k)
            z = (wq @ layer.key.weight[rows]).detach().requires_grad_()
            s = augmented(x[b], True) @ z @ x[b].T
            if "attn_bias" in masks:
                s = s + masks["attn_bias"]
            s = s.masked_fill(~allowed(masks)[b, 0], -math.inf)
            p = torch.softmax(s, -1)
            outputs.append(p @ (x[b] @ layer.value.weight[values].T + layer.value.bias[values]))
            zs.append(z)
        y = torch.cat(outputs, -1) @ layer.out.weight.T + layer.out.bias
        for h, grad in enumerate(torch.autograd.grad((y * weights[b]).sum(), zs)):
            gradients[b, h] = -grad
    return gradients


def observed(layer: MultiHead, x: Tensor, masks: dict[str, Any], weights: Tensor, **options: Any) -> LayerStatistics:
    statistics = LayerStatistics(HEADS, WIDTH + 1, WIDTH, dtype=F64, **{"rows": None, "folds": 2, **options})
    statistics.add(one_pass(layer, x, masks, weights), bias=True)
    return statistics


def one_pass(layer: MultiHead, x: Tensor, masks: dict[str, Any], weights: Tensor) -> ObservedPass:
    watch = Watch("layer", layer)
    (layer(x, **masks) * weights).sum().backward()
    (observed,) = watch.take()
    watch.close()
    return observed


@pytest.mark.parametrize("kind", KINDS)
def test_folds_are_the_gradient_of_explicit_scores(kind: str) -> None:
    layer, x, masks = case(kind)
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    expected = by_hand(layer, x, masks, weights)
    statistics = observed(layer, x, masks, weights)
    torch.testing.assert_close(statistics.folds[0], expected[0] + expected[2])  # folds are filled in turn
    torch.testing.assert_close(statistics.folds[1], expected[1])
    assert statistics.shares.tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_appended_operands_give_the_same_through_the_fused_kernel(kind: str) -> None:
    layer, x, masks = case(kind)
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    result = appended(one_pass(layer, x, masks, weights), lambda q, k: softmax(q, k, **masks), bias=True)
    torch.testing.assert_close(result, by_hand(layer, x, masks, weights).sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_only_rows_with_a_gradient_count_in_the_metrics_and_the_stored_tokens(kind: str) -> None:
    layer, x, masks = case(kind)
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    weights[1, 2:] = 0  # the loss depends on two rows of sequence 1
    statistics = observed(layer, x, masks, weights)
    live = (weights != 0).any(-1)
    gram_q, gram_k = torch.zeros(WIDTH + 1, WIDTH + 1, dtype=F64), torch.zeros(WIDTH, WIDTH, dtype=F64)
    normal, z = torch.zeros(WIDTH + 1, WIDTH, dtype=F64), torch.randn(WIDTH + 1, WIDTH, dtype=F64)
    for b in range(B):
        for i in live[b].nonzero().flatten():
            row, keys = torch.cat([x[b, i], torch.ones(1, dtype=F64)]), x[b, allowed(masks)[b, 0, i]]
            keys = keys - keys.mean(0)
            gram_q += torch.outer(row, row)
            gram_k += keys.T @ keys
            normal += torch.outer(row, row @ z @ keys.T @ keys)
    count = int(live.sum())
    torch.testing.assert_close(statistics.means()[0], gram_q / count)
    torch.testing.assert_close(statistics.means()[1], gram_k / count)
    torch.testing.assert_close(statistics.normal()(z), normal)
    assert statistics.compression_error() == 0


def test_a_random_subset_of_rows_is_unbiased() -> None:
    layer, x, masks = case("causal")
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    exact = observed(layer, x, masks, weights).folds.sum(0)
    statistics = LayerStatistics(HEADS, WIDTH + 1, WIDTH, dtype=F64, rows=3, folds=1)
    watch = Watch("layer", layer)
    for _ in range(120):
        (layer(x, **masks) * weights).sum().backward()
        statistics.add(watch.take()[0], bias=True)
    watch.close()
    mean = statistics.folds[0] / statistics.shares[0]
    assert float((mean - exact).norm() / exact.norm()) < 0.25


def test_two_batches_add_up() -> None:
    layer, x, masks = case("causal")
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    first, second = observed(layer, x, masks, weights), observed(layer, 2 * x, masks, weights)
    both = LayerStatistics(HEADS, WIDTH + 1, WIDTH, dtype=F64, rows=None, folds=1)
    for inputs in (x, 2 * x):
        both.add(one_pass(layer, inputs, masks, weights), bias=True)
    z = torch.randn(WIDTH + 1, WIDTH, dtype=F64)
    torch.testing.assert_close(both.folds[0], (first.folds + second.folds).sum(0))
    torch.testing.assert_close(both.gram_k, first.gram_k + second.gram_k)
    torch.testing.assert_close(both.normal()(z), first.normal()(z) + second.normal()(z))
    assert both.sequence_count == 6
    assert both.batches == pytest.approx(2)


def test_beyond_the_budget_gram_matrices_are_clustered_and_the_error_is_measured() -> None:
    torch.manual_seed(0)
    layer, _, _ = case("plain")
    weights = torch.randn(B, N, WIDTH, dtype=F64)
    bases = torch.randn(4, N, WIDTH, dtype=F64)
    similar, varied = (LayerStatistics(HEADS, WIDTH + 1, WIDTH, dtype=F64, memory=0) for _ in range(2))
    whole = LayerStatistics(HEADS, WIDTH + 1, WIDTH, dtype=F64)
    watch = Watch("layer", layer)
    for step in range(20):
        for statistics, x in (
            (similar, bases[torch.tensor([step % 4, (step + 1) % 4, 0])]),
            (varied, torch.randn(B, N, WIDTH, dtype=F64) * torch.randn(B, 1, WIDTH, dtype=F64).exp()),
        ):
            (layer(x) * weights).sum().backward()
            call = watch.take()[0]
            statistics.add(call, bias=True)
            if statistics is varied:
                whole.add(call, bias=True)
    watch.close()
    assert similar.used == varied.used == 0
    assert len(varied.clusters) <= 16
    assert varied.bytes < whole.bytes
    assert similar.compression_error() < 1e-12  # four kinds of sequences, sixteen clusters
    # the reported error is the true one
    exact, approximate = whole.normal()(varied.z), varied.normal()(varied.z)
    assert varied.compression_error() == pytest.approx(float((approximate - exact).norm() / exact.norm()))
    # and 16 clusters are better than one mean
    a, c = varied.normal().means()
    mean = 60 * a @ varied.z @ c
    assert varied.compression_error() < 0.8 * float((mean - exact).norm() / exact.norm())
    assert isinstance(varied.normal(), NormalMap)


@pytest.mark.parametrize("rows", [32, None])
def test_no_n_by_n_matrix_is_formed(rows: int | None) -> None:
    """Peak memory of observing 5000 tokens, against that of one n x n matrix."""
    n = 5000
    torch.manual_seed(0)
    layer, x = MultiHead(8, 1), torch.randn(1, n, 8)
    watch = Watch("layer", layer)
    layer(x, causal=True).square().mean().backward()
    (call,) = watch.take()
    watch.close()
    statistics = LayerStatistics(1, 9, 8, rows=rows)
    assert peak_bytes(lambda: statistics.add(call, bias=True)) < n * n * 4
    assert bool(statistics.folds.any())
