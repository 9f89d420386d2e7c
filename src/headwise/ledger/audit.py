"""What the theorems say about your own attention weights: the collapse bound, path lengths, symmetry, low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headwise.linalg.norms import composite_norm
from headwise.models.attention_weights import read
from headwise.theory import paths
from headwise.theory.collapse import SHRINKS, collapse
from headwise.theory.concentration import best_rank_error, expected_square
from headwise.theory.groups import permutations
from headwise.theory.residual import relative_residual
from headwise.theory.stack import Stack
from headwise.theory.symmetry import check_equivariance


def evaluate(spec: str | nn.Module, *, heads: int | None = None, tokens: int = 32, seed: int = 0) -> dict[str, Any]:
    """Every check that applies, on Gaussian tokens of unit size."""
    weights = read(spec, heads)
    stack = weights.stack
    heads, width, _ = stack.layers[0].wq.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    found = collapse(stack, x)
    with_skips = Stack(stack.layers, skip=True)
    groups = paths.by_length(with_skips, x)
    share = (groups.by_length * groups.output).sum((-2, -1)) / groups.output.square().sum()
    symmetry = check_equivariance(lambda y: stack.layers[0](y[0].double())[None].to(y.dtype), permutations(), x[None])
    p = stack.layers[0].attention(x)
    values = torch.linalg.svdvals(p)
    ranks = torch.special.entr(values / values.sum(-1, keepdim=True)).sum(-1).exp()
    alone = (composite_norm(stack.residuals(x)[-1]) / composite_norm(stack.states(x)[-1])).item()
    rank = max(1, tokens // 4)
    kept = [1 - (best_rank_error(each, rank) / each.norm().item()) ** 2 for each in p]
    centred = x[:, :1] - x[:, :1].mean()
    sketched = [(expected_square(each, centred, rank) ** 0.5 / (each @ centred).norm().item()) for each in p]
    rows = [
        _row("beta", found.beta, "largest ||W_Q W_K'||_1 ||W_V W_O||_(1,inf)"),
        _row("log(residual / bound), last layer", found.tightness[-1], "negative: under the bound"),
        _row("bound shrinks with depth", found.premises[SHRINKS], "sqrt(4 H beta / sqrt d) ||res X|| < 1"),
        _row("relative residual, pure attention", alone, "0: all tokens equal"),
        _row("relative residual, with skips", relative_residual(with_skips.states(x)[-1]).item(), ""),
        _row(
            "shares by path length, with skips",
            ", ".join(f"{s:.2f}" for s in share.tolist()),
            f"sum error {groups.error:.0e}",
        ),
        _row(
            "residual by path length",
            ", ".join(f"{s:.1g}" for s in groups.residuals().tolist()),
            "relative; 0: all tokens equal",
        ),
        _row(
            "permutation symmetry, first layer",
            symmetry.verdict.name,
            "self-attention without positions is equivariant",
        ),
        _row(
            "effective rank of P, first layer", f"{ranks.min():.1f} … {ranks.max():.1f} of {tokens}", "over its heads"
        ),
        _row(
            f"energy of P in rank {rank}, first layer",
            f"{min(kept):.3f} … {max(kept):.3f}",
            "the best matrix of that rank, over its heads",
        ),
        _row(
            f"error of a random sketch of rank {rank}",
            f"{min(sketched):.2g} … {max(sketched):.2g}",
            "relative to P w, w of zero mean: no low rank by chance",
        ),
    ]
    return {
        "layers": len(stack.layers),
        "heads": heads,
        "width": width,
        "tokens": tokens,
        "seed": seed,
        "left_out": list(weights.left_out),
        "rows": rows,
    }


def _row(what: str, value: object, note: str) -> dict[str, str]:
    return {"what": what, "value": f"{value:.3g}" if isinstance(value, float) else str(value), "note": note}
