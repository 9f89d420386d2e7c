"""Attention weights from a torch module, from `python:module:factory` or from a safetensors file, as a Stack.

The theorems speak of self-attention with a softmax over all tokens, one width throughout.  What they do not speak of
(causal masks, rotary positions, other operators, cross-attention) is an error, not a number.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError
from headwise.nn.multihead import MultiHead
from headwise.theory.stack import Stack, layer_of

LAYOUTS = (
    ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),  # BERT, RoBERTa
    ("attention.attention.query", "attention.attention.key", "attention.attention.value", "attention.output.dense"),
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),  # DistilBERT
    ("query", "key", "value", "out"),  # MultiHead
)
"""Names of the four matrices of a layer, as saved by transformers' encoders and by headwise."""
PACKED = "in_proj_weight"  # torch's MultiheadAttention
NOT_COVERED = {
    "c_attn": "a GPT-2-like decoder, whose softmax runs over earlier tokens only",
    "q_proj": "projections called q_proj, as in decoders with rotary positions or in cross-attention",
    "query_key_value": "a packed decoder projection",
}


@dataclass(frozen=True, eq=False)
class Weights:
    """The attention layers in order, and what of the model they leave out."""

    stack: Stack
    left_out: tuple[str, ...]


def read(spec: str | nn.Module, heads: int | None = None) -> Weights:
    """All attention layers of a module or a file; `heads` where the file does not say how many there are."""
    if isinstance(spec, nn.Module):
        return _from_module(spec, heads)
    if spec.startswith("python:"):
        return _from_module(_made(spec), heads)
    path = Path(spec)
    if path.suffix != ".safetensors":
        raise InputError(f"{spec}: weights come as .safetensors or python:module:factory; pickled files are not loaded")
    return _from_tensors(str(path), _load(path), _heads_of_file(path) if heads is None else heads)


def stack_of(spec: str | nn.Module, heads: int | None = None) -> Stack:
    return read(spec, heads).stack


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


def _from_module(module: nn.Module, heads: int | None) -> Weights:
    found = [m for m in module.modules() if isinstance(m, (MultiHead, nn.MultiheadAttention))]
    if not found:
        config = getattr(module, "config", None)
        told = heads if heads is not None else getattr(config, "num_attention_heads", None)
        return _from_tensors(type(module).__name__, module.state_dict(), told)
    ours = [m if isinstance(m, MultiHead) else MultiHead.from_torch(m) for m in found]
    inside = {id(part) for m in found for part in m.modules()}
    others = Counter(
        type(part).__name__ for part in module.modules() if id(part) not in inside and not list(part.children())
    )
    return Weights(
        Stack(tuple(layer_of(layer) for layer in ours)), tuple(f"{count} {name}" for name, count in others.items())
    )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError("safetensors files need the package; pip install 'headwise[models]'") from error
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _heads_of_file(path: Path) -> int | None:
    """From the config.json that transformers saves beside the weights."""
    try:
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return next(
        (config[name] for name in ("num_attention_heads", "n_heads") if isinstance(config.get(name), int)), None
    )


def _from_tensors(owner: str, tensors: Mapping[str, Tensor], heads: int | None) -> Weights:
    layers, used = [], set[str]()
    for prefix, names in _found(tensors):
        mine = {name: tensors[name].double() for name in tensors if name.startswith(tuple(names))}
        used |= set(mine)
        saved = [tensors.get(f"{prefix}{part}_heads.widths") for part in ("key", "value")]
        used |= {
            f"{prefix}{part}_heads.widths"
            for part, widths in zip(("key", "value"), saved, strict=True)
            if widths is not None
        }
        layers.append(_layer(owner, prefix, _parts(owner, prefix, names, mine), saved, heads))
    if not layers:
        why = next((what for part, what in NOT_COVERED.items() if any(part in name for name in tensors)), None)
        raise UnsupportedError(
            f"{owner} has no attention layer that the theory covers"
            + (f": it looks like {why}" if why else f" (found {', '.join([*tensors][:3])} …)")
            + "; covered are MultiHead, torch's MultiheadAttention and encoders of the BERT kind "
            "(headwise examine measures any model)"
        )
    rest = len(tensors) - len(used)
    return Weights(Stack(tuple(layer_of(layer) for layer in layers)), (f"{rest} other tensors",) if rest else ())


def _found(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    """(prefix, the names of its parts) of every attention layer, in the order of their numbers."""
    found = []
    for name in tensors:
        if name.endswith(PACKED):
            prefix = name.removesuffix(PACKED)
            found.append((prefix, (f"{prefix}in_proj_", f"{prefix}out_proj.")))
        for layout in LAYOUTS:
            if name.endswith(f"{layout[0]}.weight"):
                prefix = name.removesuffix(f"{layout[0]}.weight")
                parts = tuple(f"{prefix}{part}." for part in layout)
                if all(f"{part}weight" in tensors for part in parts):
                    found.append((prefix, parts))
                    break
    return sorted(found, key=lambda each: [int(x) if x.isdigit() else -1 for x in re.split(r"[._]", each[0])])


def _layer(
    owner: str,
    prefix: str,
    parts: Sequence[tuple[Tensor, Tensor | None]],
    saved: Sequence[Tensor | None],
    heads: int | None,
) -> MultiHead:
    """`saved`: key and value widths of every head, where headwise wrote them."""
    name = f"{owner}: {prefix or 'its weights'}"
    sizes = [tuple(weight.shape) for weight, _ in parts]
    (keys, width), (values, _) = sizes[0], sizes[2]
    if sizes[1] != sizes[0] or sizes[2][1] != width or sizes[3] != (width, values):
        said = ", ".join(f"{part} {size}" for part, size in zip("qkvo", sizes, strict=True))
        raise InputError(f"{name}: shapes {said} are not one self-attention layer")
    each = []
    for total, widths in zip((keys, values), saved, strict=True):
        if widths is not None:
            each.append(widths.tolist())
            continue
        if heads is None:
            raise InputError(
                f"{owner} does not say how many heads it has; give heads= (--heads), or keep the config.json beside it"
            )
        if heads < 1 or total % heads:
            raise InputError(f"{name}: width {total} cannot be split over {heads} heads")
        each.append([total // heads] * heads)
    layer = MultiHead(width, len(each[0]), key_width=each[0], value_width=each[1])
    for linear, (weight, bias) in zip((layer.query, layer.key, layer.value, layer.out), parts, strict=True):
        linear.weight.data = weight
        linear.bias.data = weight.new_zeros(len(weight)) if bias is None else bias
    return layer


def _parts(
    owner: str, prefix: str, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of query, key, value and output."""
    if not names[0].endswith("in_proj_"):
        return [(tensors[f"{name}weight"], tensors.get(f"{name}bias")) for name in names]
    packed, bias = tensors[f"{prefix}{PACKED}"], tensors.get(f"{prefix}in_proj_bias")
    out = tensors.get(f"{prefix}out_proj.weight")
    if packed.dim() != 2 or len(packed) % 3 or out is None or out.shape != (len(packed) // 3, packed.shape[1]):
        shapes = f"{tuple(packed.shape)} and {None if out is None else tuple(out.shape)}"
        raise InputError(f"{owner}: {prefix or 'its weights'}: shapes {shapes} are not one self-attention layer")
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [*zip(packed.chunk(3), biases, strict=True), (out, tensors.get(f"{prefix}out_proj.bias"))]
