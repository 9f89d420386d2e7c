"""The theorems about depth, symmetry and low rank, evaluated on the attention weights of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import nn

from headwise.linalg.norms import composite_norm
from headwise.linalg.ranks import effective_rank, energy
from headwise.linalg.spectrum import dense_spectrum
from headwise.models.attention_weights import read_weights
from headwise.theory import paths
from headwise.theory.collapse import SHRINKS, collapse, relative_residual
from headwise.theory.concentration import expected_square
from headwise.theory.groups import permutations
from headwise.theory.stack import Stack
from headwise.theory.symmetry import check_equivariance


@final
@dataclass(frozen=True)
class Audit:
    """Quantities with their values and explanations as text, and the parts of the model that were not covered."""

    layers: int
    heads: int
    width: int
    tokens: int
    seed: int
    left_out: tuple[str, ...]
    rows: tuple[dict[str, str], ...]  # quantity, value, note

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit_weights(weights: str | nn.Module, *, heads: int | None = None, tokens: int = 32, seed: int = 0) -> Audit:
    """Collapse bound, path lengths, symmetry and low rank of the attention layers, for standard normal tokens.

    weights   a module, a .safetensors file, or python:module:factory
    heads     the number of heads of each layer, where the weights do not determine it
    """
    model = read_weights(weights, heads)
    stack, first = model.stack, model.stack.layers[0]
    count, width, _ = first.wq.shape
    x = torch.randn(tokens, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    bound = collapse(stack, x)
    with_skips = Stack(stack.layers, skip=True)
    groups = paths.by_length(with_skips, x)
    share = (groups.by_length * groups.output).sum((-2, -1)) / groups.output.square().sum()
    symmetry = check_equivariance(lambda y: first(y[0].double())[None].to(y.dtype), permutations(), x[None])
    pure = (composite_norm(stack.residuals(x)[-1]) / composite_norm(stack.states(x)[-1])).item()
    p, rank = first.attention(x), max(1, tokens // 4)
    spectrum = dense_spectrum(p)
    ranks, energies = effective_rank(spectrum), energy(spectrum)[:, rank - 1]
    w = x[:, :1] - x[:, :1].mean()
    errors = torch.tensor([expected_square(head, w, rank) ** 0.5 / (head @ w).norm().item() for head in p])
    rows = (
        _row("beta", bound.beta, "largest over layers; heads added in ||.||_1 and ||.||_inf"),
        _row("log(residual / bound), last layer", bound.tightness[-1], "negative: below the bound"),
        _row("bound shrinks with depth", bound.premises[SHRINKS], "C beta / sqrt(d) ||res X||^2 < 1"),
        _row("relative residual, pure attention", pure, "0: all tokens equal"),
        _row("relative residual, with skips", relative_residual(with_skips.states(x)[-1]).item(), ""),
        _row(
            "share of output by path length",
            [f"{s:.2f}" for s in share],
            f"with skips, without norms and MLPs, random tokens; sum error {groups.error:.0e}",
        ),
        _row("residual by path length", [f"{s:.1g}" for s in groups.residuals()], "relative; 0: all tokens equal"),
        _row("permutation symmetry, first layer", symmetry.verdict.name, "self-attention without positions has it"),
        _row("effective rank of P, first layer", f"{_range(ranks, '.1f')} of {tokens}", "over its heads"),
        _row(f"energy of P in rank {rank}, first layer", _range(energies, ".3f"), "best rank approximation"),
        _row(f"error of a random sketch of rank {rank}", _range(errors, ".2g"), "relative to P w, w of zero mean"),
    )
    return Audit(len(stack.layers), count, width, tokens, seed, model.left_out, rows)


def _row(quantity: str, value: float | bool | str | list[str], note: str) -> dict[str, str]:
    text = ", ".join(value) if isinstance(value, list) else f"{value:.3g}" if isinstance(value, float) else str(value)
    return {"quantity": quantity, "value": text, "note": note}


def _range(x: torch.Tensor, digits: str) -> str:
    return f"{x.min().item():{digits}} … {x.max().item():{digits}}"
