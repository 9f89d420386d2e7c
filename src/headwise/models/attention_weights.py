"""Attention weights from a torch module, `python:module:factory`, a safetensors file or its directory, as a Stack.

The theorems about depth apply to self-attention with a softmax over all tokens and one width throughout.  Other models
(causal masks, rotary positions, other operators, cross-attention) raise an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from headwise.errors import InputError, UnsupportedError, needs_extra
from headwise.models.factory import call_factory
from headwise.models.samples.sample_models import SAMPLES
from headwise.nn.multihead import MultiHead, multihead_from
from headwise.reading import anything, map_of, read_json
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
class AttentionWeights:
    """The attention layers in order, and the parts of the model that are not included."""

    stack: Stack
    left_out: tuple[str, ...]


def read_weights(spec: str | nn.Module, heads: int | None = None) -> AttentionWeights:
    """All attention layers of a module or file; `heads` is needed where it cannot be read from it."""
    if isinstance(spec, nn.Module):
        return _from_module(spec, heads)
    if spec.startswith("python:"):
        return _from_module(call_factory(spec)[0], heads)
    path = SAMPLES[spec].located() if spec in SAMPLES else Path(spec)
    if path.is_dir() and (path / "model.safetensors").is_file():
        path = path / "model.safetensors"
    if path.suffix != ".safetensors":
        raise InputError(
            f"{spec}: give a .safetensors file, a directory with model.safetensors, python:module:factory or minilm; "
            "pickled files are not loaded"
        )
    return _from_tensors(str(path), _load(path), _heads_of_file(path) if heads is None else heads)


def _from_module(module: nn.Module, heads: int | None) -> AttentionWeights:
    attention = [m for m in module.modules() if isinstance(m, (MultiHead, nn.MultiheadAttention))]
    if not attention:
        declared = getattr(getattr(module, "config", None), "num_attention_heads", None)
        declared = declared if isinstance(declared, int) else None  # a list: each stage has its own
        return _from_tensors(type(module).__name__, module.state_dict(), declared if heads is None else heads)
    layers = tuple(layer_of(m if isinstance(m, MultiHead) else MultiHead.from_torch(m)) for m in attention)
    inside = {id(part) for m in attention for part in m.modules()}
    leaves = (part for part in module.modules() if id(part) not in inside and not list(part.children()))
    others = Counter(type(part).__name__ for part in leaves)
    return AttentionWeights(Stack(layers), tuple(f"{count} {name}" for name, count in others.items()))


def _load(path: Path) -> dict[str, Tensor]:
    with needs_extra("models", f"reading {path.name}"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _heads_of_file(path: Path) -> int | None:
    """The number of heads in the config.json that transformers saves beside the weights."""
    try:
        config = read_json(path.parent / "config.json", map_of(anything), "a config.json", foreign=True)
    except InputError:
        return None
    return next(
        (config[name] for name in ("num_attention_heads", "n_heads") if isinstance(config.get(name), int)), None
    )


def _from_tensors(owner: str, tensors: Mapping[str, Tensor], heads: int | None) -> AttentionWeights:
    layers, used = [], set[str]()
    for prefix, names in _attention_layers(tensors):
        weights = {name: tensors[name].double() for name in tensors if name.startswith(tuple(names))}
        width_names = [f"{prefix}{part}_heads.widths" for part in ("key", "value")]
        used |= weights.keys() | (tensors.keys() & set(width_names))
        widths = [tensors.get(name) for name in width_names]
        layers.append(_layer(owner, prefix, _parts(owner, prefix, names, weights), widths, heads))
    if not layers:
        why = next((what for part, what in NOT_COVERED.items() if any(part in name for name in tensors)), None)
        raise UnsupportedError(
            f"{owner} has no attention layer that the theorems apply to"
            + (f": it looks like {why}" if why else f" (it has {', '.join([*tensors][:3])} …)")
            + "; supported are MultiHead, torch's MultiheadAttention and encoders like BERT "
            "(headwise examine measures any model)"
        )
    rest = len(tensors) - len(used)
    return AttentionWeights(
        Stack(tuple(layer_of(layer) for layer in layers)), (f"{rest} other tensors",) if rest else ()
    )


def _attention_layers(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[str, ...]]]:
    """(prefix, names of its parts) of every attention layer, in the order of the numbers in their names."""
    layers = []
    for name in tensors:
        if name.endswith(PACKED):
            prefix = name.removesuffix(PACKED)
            layers.append((prefix, (f"{prefix}in_proj_", f"{prefix}out_proj.")))
        for layout in LAYOUTS:
            if name.endswith(f"{layout[0]}.weight"):
                prefix = name.removesuffix(f"{layout[0]}.weight")
                parts = tuple(f"{prefix}{part}." for part in layout)
                if all(f"{part}weight" in tensors for part in parts):
                    layers.append((prefix, parts))
                    break
    return sorted(layers, key=lambda layer: [int(x) if x.isdigit() else -1 for x in re.split(r"[._]", layer[0])])


def _layer(
    owner: str,
    prefix: str,
    parts: Sequence[tuple[Tensor, Tensor | None]],
    saved_widths: Sequence[Tensor | None],
    heads: int | None,
) -> MultiHead:
    """`saved_widths`: key and value widths of every head, which MultiHead saves."""
    name = f"{owner}: {prefix or 'its weights'}"
    sizes = [tuple(weight.shape) for weight, _ in parts]
    (keys, width), (values, _) = sizes[0], sizes[2]
    if sizes[1] != sizes[0] or sizes[2][1] != width or sizes[3] != (width, values):
        shapes = ", ".join(f"{part} {size}" for part, size in zip("qkvo", sizes, strict=True))
        raise InputError(f"{name}: shapes {shapes} are not one self-attention layer")
    widths = []
    for total, saved in zip((keys, values), saved_widths, strict=True):
        if saved is not None:
            widths.append(saved.tolist())
            continue
        if heads is None:
            raise InputError(
                f"{owner}: the number of heads is unknown; give heads= (--heads), or put the config.json beside it"
            )
        if heads < 1 or total % heads:
            raise InputError(f"{name}: width {total} cannot be split over {heads} heads")
        widths.append([total // heads] * heads)
    filled = [(weight, weight.new_zeros(len(weight)) if bias is None else bias) for weight, bias in parts]
    return multihead_from(filled, len(widths[0]), key_width=widths[0], value_width=widths[1])


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
