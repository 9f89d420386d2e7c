"""The twins themselves, against what torch and scipy have for the same definitions."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.testing import references

SEEDED = torch.Generator().manual_seed(0)
Q = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=SEEDED)
K = torch.randn(2, 3, 7, 4, dtype=torch.float64, generator=SEEDED)
MASK = torch.rand(2, 1, 5, 7, generator=SEEDED) < 0.6


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, check_dtype=True)


def sdpa(**options: object) -> Tensor:
    eye = torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7)
    return F.scaled_dot_product_attention(Q, K, eye, **options)  # type: ignore[arg-type]


def test_softmax() -> None:
    close(references.softmax(Q, K), sdpa())
    close(references.softmax(Q, K, scale=3.0), sdpa(scale=3.0))
    close(references.softmax(Q, K, pair_mask=MASK), sdpa(attn_mask=MASK))
    bias = torch.randn(3, 5, 7, dtype=torch.float64)
    close(references.softmax(Q, K, attn_bias=bias), sdpa(attn_mask=bias))
    silencing = bias.masked_fill(bias > 0.5, -math.inf)
    close(references.softmax(Q, K, attn_bias=silencing), sdpa(attn_mask=silencing))


def test_causal_is_aligned_to_the_bottom_right() -> None:
    close(references.softmax(Q, K, causal=True), sdpa(attn_mask=torch.ones(5, 7, dtype=torch.bool).tril(2)))
    more_queries = references.softmax(K, Q, causal=True)
    assert (more_queries[..., :2, :] == 0).all()
    close(more_queries[..., 2:, :].sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


def test_padding_removes_keys_and_a_row_without_keys_is_zero() -> None:
    key_mask = torch.tensor([[True, True, False] + [True] * 4, [False] * 7])[:, None]
    p = references.softmax(Q, K, key_mask=key_mask)
    kept = [0, 1, 3, 4, 5, 6]
    close(p[0][..., kept], references.softmax(Q, K[..., kept, :])[0])
    assert (p[0][..., 2] == 0).all()
    assert (p[1] == 0).all()


def test_large_scores_neither_overflow_nor_lose_their_gradient() -> None:
    q = (1e3 * Q).requires_grad_()
    p = references.softmax(q, K, pair_mask=MASK)
    assert p.isfinite().all()
    assert torch.autograd.grad(p.square().sum(), q)[0].isfinite().all()


def test_grouped_heads_are_read_by_neighbours() -> None:
    close(references.grouped(K, 6), K.repeat_interleave(2, dim=-3))


def test_similarities() -> None:
    theta, phi = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    scores = (Q @ theta.mT) @ (K @ phi.mT).mT
    close(references.gaussian(Q, K), (Q @ K.mT).softmax(-1))
    close(references.embedded_gaussian(Q, K, theta, phi), scores.softmax(-1))
    close(references.dot_product(Q, K), Q @ K.mT / 7)
    close(references.dot_product(Q, K, theta=theta, phi=phi), scores / 7)
    w = torch.randn(8, dtype=torch.float64)
    heights = (Q @ w[:4])[..., :, None] + (K @ w[4:])[..., None, :]
    close(references.concatenation(Q, K, w), heights.relu() / 7)
    seen = MASK.sum(-1, keepdim=True).clamp(min=1)
    close(references.dot_product(Q, K, pair_mask=MASK), (Q @ K.mT).masked_fill(~MASK, 0) / seen)
    close(references.concatenation(Q, K, w, pair_mask=MASK), heights.relu().masked_fill(~MASK, 0) / seen)


def test_uniform() -> None:
    close(references.uniform(2, 4), torch.full((2, 4), 0.25, dtype=torch.float64))
    lower = torch.ones(4, 4, dtype=torch.float64).tril()
    close(references.uniform(4, 4, causal=True), lower / lower.sum(-1, keepdim=True))


@pytest.mark.parametrize("border", references.BORDERS)
def test_shift(border: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    p = references.shift((3, 4), (1, -2), border=border)
    padded = F.pad(x[None], (2, 2, 1, 1), mode="constant" if border == "zeros" else border)[0]
    close((p @ x.flatten()).reshape(3, 4), padded[2:5, 0:4])
    strided = references.shift((3, 4), (1, -2), border=border, stride=(2, 3), queries=(2, 2))
    at = padded[2:5:2, 0:4:3]
    close((strided @ x.flatten()).reshape(2, 2), at)


def test_an_unknown_border_is_refused() -> None:
    with pytest.raises(ValueError, match=r"border must be one of .* but is 'wrap'"):
        references.shift((3,), (1,), border="wrap")


def test_toeplitz() -> None:
    w = torch.randn(9, dtype=torch.float64)
    column, row = w[:4].flip(0), w[3:]
    close(references.toeplitz(w, 4, 6), torch.from_numpy(scipy.linalg.toeplitz(column.numpy(), row.numpy())))


def test_composition() -> None:
    a, b = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    close(references.kronecker(a, b), torch.kron(a, b))
    close(references.product(a, b.new_ones(4, 2)), a @ b.new_ones(4, 2))
    close(references.product(Q, K.mT), Q @ K.mT)
    close(references.total(a, a, a), 3 * a)
    close(references.transposed(Q), Q.mT)


def test_measures() -> None:
    p = references.softmax(Q, K, pair_mask=MASK)
    close(references.entropy(p), torch.special.entr(p).sum(-1))
    close(references.row_maxima(p), p.amax(-1))
    close(references.frobenius_norm(p), torch.linalg.matrix_norm(p))
    scores = Q @ K.mT
    close(references.log_sum_exp(scores), scores.logsumexp(-1))
    close(references.log_sum_exp(scores, MASK), scores.masked_fill(~MASK, -math.inf).logsumexp(-1))
    assert references.log_sum_exp(scores, MASK & False).eq(-math.inf).all()


def test_references_import_nothing_of_ours() -> None:
    for file in Path(references.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.startswith((".", "headwise")) and "testing.references" not in name]
            assert not ours, f"{file.name} imports {ours}: a twin shares no code with what it judges"
