"""The sums of one pass over blocks of P, against the whole P in float64, for every form of mask and block size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.examination.measure.streaming import REACH, Workspace, stream
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask

H, M, N = 4, 60, 80

MASKS = {
    "none": lambda: Mask(M, N),
    "causal": lambda: Mask(M, N, causal=True),
    "padding": lambda: Mask(M, N, key_mask=torch.arange(N)[None] < 70),
    "causal with padding": lambda: Mask(M, N, True, key_mask=torch.arange(N)[None] >= 10),
    "pairs of each head": lambda: Mask(M, N, pair_mask=torch.rand(H, M, N) < 0.7),
    "bias of each head": lambda: Mask(M, N, attn_bias=torch.randn(H, M, N)),
    "causal with a bias": lambda: Mask(M, N, True, attn_bias=torch.randn(H, 1, N)),
}


POSITIONS = {
    "all queries": torch.arange(M),
    "queries at the end": torch.arange(N - M, N),
    "queries with gaps": torch.arange(N)[torch.arange(N) % 4 < 3],
}


@pytest.mark.parametrize("entries", [1 << 19, 12000, 1000])
@pytest.mark.parametrize(
    ("name", "places"),
    [*((name, "all queries") for name in MASKS), *(("causal", places) for places in list(POSITIONS)[1:])],
)
def test_sums_equal_the_whole_matrix(name: str, places: str, entries: int) -> None:
    q, k, v = 2 * torch.randn(H, M, 8), torch.randn(H, N, 8), torch.randn(H, N, 5)
    mask, positions = MASKS[name](), POSITIONS[places]
    visible = mask.rows(0, M)
    s = q.double() @ k.double().mT * 0.35
    s = (s if mask.attn_bias is None else s + mask.attn_bias).masked_fill(~visible, -math.inf)
    p = torch.softmax(s, -1)
    found = stream(Scores(q, k, 0.35, mask), v, positions=positions, workspace=Workspace(entries))

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=2e-6)

    close(found.entropy, torch.special.entr(p).sum(-1))
    close(found.row_maximum, p.amax(-1))
    close(found.row_squares, p.square().sum(-1))
    close(found.log_sum_exp, torch.logsumexp(s, -1))
    close(found.largest_score, s.amax((-2, -1)))
    close(found.received, p.mean(-2))
    close(found.visible, visible.sum(-1).expand(H, M))
    close(found.output, p @ v.double())
    offsets = torch.arange(N) - positions[:, None]
    on = [offsets == o for o in range(-int(positions[-1]), N)]
    close(found.diagonals, torch.stack([p[:, here].sum(-1) for here in on], -1))
    energy = torch.stack([p[:, here].sum(-1).square() / max(1, int(here.sum())) for here in on], -1)
    close(found.diagonal_energy, energy)
    close(found.mass_within(4), p[:, offsets.abs() <= 4].sum(-1) / M)
    close(found.profile()[:, REACH - 1], p[:, offsets == -1].sum(-1) / M)
    assert found.profile().shape == (H, 2 * REACH + 1)
