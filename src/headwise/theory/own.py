"""What the theorems say about your own attention weights: the collapse bound, path lengths, symmetry, rank.

Weights come as a torch module (python:module:factory) or as safetensors with in_proj_weight / out_proj.weight pairs,
the names of torch's MultiheadAttention.  Layers the theory does not speak of are an error, not a number.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.multihead import MultiHead
from headwise.theory import paths
from headwise.theory.collapse import collapse
from headwise.theory.groups import permutations
from headwise.theory.residual import relative_residual
from headwise.theory.stack import Layer, Stack, layer_of
from headwise.theory.symmetry import check_equivariance


def evaluate(spec: str | nn.Module, *, tokens: int = 32, seed: int = 0) -> dict[str, Any]:
    """Every check that applies, on Gaussian tokens of unit size."""
    stack = stack_of(spec)
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
    rows = [
        _row("beta", found.beta, "largest ||W_Q W_K'||_1 ||W_V W_O||_(1,inf)"),
        _row("log(residual / bound), last layer", found.tightness[-1], "negative: under the bound"),
        _row(
            "bound shrinks with depth",
            next(iter(list(found.premises.values())[1:])),
            "sqrt(4 H beta / sqrt d) ||res X|| < 1",
        ),
        _row("relative residual, pure attention", relative_residual(stack.states(x)[-1]).item(), "0: all tokens equal"),
        _row("relative residual, with skips", relative_residual(with_skips.states(x)[-1]).item(), ""),
        _row(
            "shares by path length, with skips",
            ", ".join(f"{s:.2f}" for s in share.tolist()),
            f"sum error {groups.error:.0e}",
        ),
        _row(
            "permutation symmetry, first layer",
            symmetry.verdict.name,
            "self-attention without positions is equivariant",
        ),
        _row(
            "effective rank of P, first layer", f"{ranks.min():.1f} … {ranks.max():.1f} of {tokens}", "over its heads"
        ),
    ]
    return {"layers": len(stack.layers), "heads": heads, "width": width, "tokens": tokens, "seed": seed, "rows": rows}


def stack_of(spec: str | nn.Module) -> Stack:
    """All attention layers of a module or a safetensors file, in order, as a Stack of self-attention."""
    if isinstance(spec, nn.Module):
        return _from_module(spec)
    if spec.startswith("python:"):
        return _from_module(_made(spec))
    path = Path(spec)
    if path.suffix != ".safetensors":
        raise InputError(f"{spec}: weights come as .safetensors or python:module:factory; pickled files are not loaded")
    return _from_file(path)


def _made(spec: str) -> nn.Module:
    parts = spec.split(":")
    if len(parts) != 3:
        raise InputError(f"{spec}: write python:module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(parts[1]), parts[2])()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{spec}: cannot be imported ({error})") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"{spec}: the factory returned {type(made).__name__}, not a torch module")
    return made


def _from_module(module: nn.Module) -> Stack:
    found = [m for m in module.modules() if isinstance(m, (MultiHead, nn.MultiheadAttention))]
    if not found:
        raise UnsupportedError(
            f"{type(module).__name__} has no MultiHead or torch MultiheadAttention; the theory covers self-attention "
            "layers of these kinds (headwise examine measures any model)"
        )
    ours = [m if isinstance(m, MultiHead) else MultiHead.from_torch(m) for m in found]
    return Stack(tuple(layer_of(layer) for layer in ours))


def _from_file(path: Path) -> Stack:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError("safetensors files need the package; pip install 'headwise[models]'") from error
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    names = [name.removesuffix("in_proj_weight") for name in tensors if name.endswith("in_proj_weight")]
    if not names:
        raise UnsupportedError(
            f"{path} has no in_proj_weight; the file must hold torch MultiheadAttention layers "
            f"(found {', '.join(list(tensors)[:3])} …)"
        )
    heads = {name: tensors.get(f"{name}heads") for name in names}
    return Stack(tuple(_layer(tensors, name, heads[name]) for name in sorted(names, key=_natural)))


def _layer(tensors: dict[str, Tensor], name: str, heads: Tensor | None) -> Layer:
    weight, out = tensors[f"{name}in_proj_weight"].double(), tensors[f"{name}out_proj.weight"].double()
    width = out.shape[0]
    # the file does not say how many heads there are; 64 columns a head is the custom
    count = int(heads) if heads is not None else max(1, width // 64)
    module = nn.MultiheadAttention(width, count, bias=f"{name}in_proj_bias" in tensors, dtype=torch.float64)
    state = {
        key.removeprefix(name): x.double()
        for key, x in tensors.items()
        if key.startswith(name) and not key.endswith("heads")
    }
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"{name}: shapes {tuple(weight.shape)} and {tuple(out.shape)} are not one attention layer"
        ) from error
    return layer_of(MultiHead.from_torch(module))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _row(what: str, value: object, note: str) -> dict[str, str]:
    return {"what": what, "value": f"{value:.3g}" if isinstance(value, float) else str(value), "note": note}
