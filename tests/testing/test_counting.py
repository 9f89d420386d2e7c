"""Counted multiply-adds of matrix products and sums, and traced memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from headwise.testing.counting import count_multiply_adds, peak_bytes

A, B = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 4, 7)
Q, K = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4)
V, WIDE, BIAS = torch.ones(2, 3, 7, 4), torch.ones(2, 3, 7, 9), torch.zeros(5, 7)

PRODUCTS: list[tuple[str, Callable[[], object], int]] = [
    ("matmul", lambda: A @ B, 6 * 5 * 4 * 7),
    ("matmul that broadcasts", lambda: A @ B[0, 0], 6 * 5 * 4 * 7),
    ("matrix times vector", lambda: A[0, 0] @ torch.ones(4), 5 * 4),
    ("batch times vector", lambda: A @ torch.ones(4), 6 * 5 * 4),
    ("dot", lambda: torch.dot(torch.ones(9), torch.ones(9)), 9),
    ("addmm", lambda: torch.addmm(torch.ones(7), torch.ones(5, 4), torch.ones(4, 7)), 5 * 4 * 7),
    ("baddbmm", lambda: torch.baddbmm(torch.ones(3, 5, 7), A[0], B[0]), 3 * 5 * 4 * 7),
    ("addmm in place", lambda: torch.zeros(5, 7).addmm_(torch.ones(5, 4), torch.ones(4, 7)), 5 * 4 * 7),
    ("baddbmm in place", lambda: torch.zeros(3, 5, 7).baddbmm_(A[0], B[0]), 3 * 5 * 4 * 7),
    ("linear", lambda: F.linear(A, torch.ones(7, 4), torch.ones(7)), 6 * 5 * 4 * 7),
    ("einsum", lambda: torch.einsum("bhmk,bhnk->bhmn", Q, K), 6 * 5 * 7 * 4),
    ("einsum of three", lambda: torch.einsum("mk,nk,nd->md", Q[0, 0], K[0, 0], V[0, 0]), 35 * 4 + 35 * 4),
    ("convolution", lambda: F.conv1d(torch.ones(2, 3, 10), torch.ones(6, 3, 3)), 2 * 6 * 8 * 3 * 3),
    ("grouped convolution", lambda: F.conv1d(torch.ones(2, 3, 10), torch.ones(3, 1, 3), groups=3), 2 * 3 * 8 * 3),
    ("fused attention", lambda: F.scaled_dot_product_attention(Q, K, V), 6 * 35 * (4 + 4)),
    ("fused, masked", lambda: F.scaled_dot_product_attention(Q, K, V, attn_mask=BIAS), 6 * 35 * (4 + 4)),
    ("fused, causal", lambda: F.scaled_dot_product_attention(K, K, V, is_causal=True), 6 * 49 * (4 + 4)),
    ("math path, d_v != d_k", lambda: F.scaled_dot_product_attention(Q, K, WIDE), 6 * 35 * (4 + 9)),
    ("3-D", lambda: F.scaled_dot_product_attention(Q[0], K[0], V[0]), 3 * 35 * (4 + 4)),
    (
        "grouped queries",
        lambda: F.scaled_dot_product_attention(Q, K[:, :1], V[:, :1], enable_gqa=True),
        6 * 35 * (4 + 4),
    ),
    ("under vmap", lambda: torch.vmap(lambda a: a @ torch.ones(4, 7))(A), 6 * 5 * 4 * 7),
]
SUMS: list[tuple[str, Callable[[], object], int]] = [
    ("weighted sum", lambda: (A * A).sum(-1), 2 * A.numel()),
    ("mean", lambda: A.mean(-2), A.numel()),
    ("running sum", lambda: A.cumsum(-2), A.numel()),
    ("index_add", lambda: torch.zeros(4, 16).index_add(0, torch.tensor([1, 2]), torch.ones(2, 16)), 32),
    ("index_add in place", lambda: torch.zeros(4, 16).index_add_(0, torch.tensor([1, 2]), torch.ones(2, 16)), 32),
    ("scatter_add", lambda: torch.zeros(9).scatter_add(0, torch.tensor([1, 1, 2]), torch.ones(3)), 3),
    ("addcmul", lambda: torch.zeros(4, 5).addcmul(torch.ones(4, 1), torch.ones(1, 5)), 20),
    ("pooling", lambda: F.avg_pool1d(torch.ones(2, 3, 8), 4), 48),
    ("Fourier", lambda: torch.fft.fft(torch.ones(16, dtype=torch.complex64)), 16 * int(math.log2(16))),
]


@pytest.mark.parametrize("name, run, expected", PRODUCTS, ids=lambda x: x if isinstance(x, str) else "")
def test_products(name: str, run: Callable[[], object], expected: int) -> None:
    assert count_multiply_adds(run).products == expected, name


@pytest.mark.parametrize("name, run, expected", SUMS, ids=lambda x: x if isinstance(x, str) else "")
def test_sums(name: str, run: Callable[[], object], expected: int) -> None:
    count = count_multiply_adds(run)
    assert (count.products, count.sums) == (0, expected), name


def test_copies_additions_and_exponentials_are_free() -> None:
    count = count_multiply_adds(lambda: (A.exp() + A).transpose(-1, -2).contiguous().roll(1, -1).softmax(-1) / 3)
    assert (count.products, count.sums) == (0, 0)


def test_counting_disables_gradients_and_does_not_change_results() -> None:
    out: list[torch.Tensor] = []
    weight = torch.ones(4, 4, requires_grad=True)
    count_multiply_adds(lambda: out.append(A @ weight))
    assert not out[0].requires_grad
    torch.testing.assert_close(out[0], (A @ weight).detach())


def test_peak_bytes_are_those_alive_at_once() -> None:
    x = torch.zeros(100, 100)  # 40 kB
    assert peak_bytes(lambda: x + 1) == 40_000
    assert peak_bytes(lambda: (x + 1) + 1) == 80_000  # the first dies after the second is made
    assert peak_bytes(lambda: [x + 1 for _ in range(3)]) == 120_000
    assert peak_bytes(lambda: [(x + 1).sum() for _ in range(3)]) == 40_000 + 3 * 4  # never two large ones
    assert peak_bytes(lambda: x.mT.reshape(10, 1000)[:5]) == 40_000  # a copy and its view
    assert peak_bytes(lambda: x.clone().add_(1).mul_(2)) == 40_000
    assert peak_bytes(lambda: x.view(-1)) == 0
    assert peak_bytes(lambda: torch.softmax(x @ x.mT, -1) @ x) == 80_000 + 40_000 - 40_000
    layer = torch.nn.Linear(16, 16)
    assert peak_bytes(lambda: layer(torch.zeros(8, 16))) == 2 * 8 * 16 * 4
