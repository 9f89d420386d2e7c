"""Every family of models that transformers can build tiny, examined and compared with an own dense computation.

    python -m tests.examination.families bert llama     these families, one line each
    python -m tests.examination.families --write        all of them; writes docs/reference/families.md

Nothing here uses the interception or the operators of headwise: attention calls are recorded by replacing
`scaled_dot_product_attention`, and P is formed from them in float64.  Attention that is written out by hand is recorded
by replacing softmax and matrix products: a product whose first factor equals, number by number, the latest softmax.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import io
import json
import math
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
START, END = "<!-- families: start -->", "<!-- families: end -->"

SECONDS = 6
"""Processor time that one family may take."""

LARGEST = 60_000_000
"""Parameters of a model that still counts as tiny."""

WIDTH, LAYERS, HEADS, TOKENS, IMAGE, PATCH = 32, 2, 4, 24, 32, 8

LAYER_FIELDS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "depth",
    "num_decoder_layers",
    "decoder_num_layers",
    "encoder_num_layers",
    "decoder_depth",
    "encoder_depth",
    "mask_decoder_depth",
]

FIELDS: dict[str, int | float] = {
    **dict.fromkeys(LAYER_FIELDS, LAYERS),
    **dict.fromkeys(
        [
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "embedding_size",
            "hidden_dim",
            "projection_dim",
            "encoder_hidden_size",
            "decoder_hidden_size",
            "n_embed",
            "attention_hidden_size",
            "text_embed_dim",
            "out_hidden_size",
            "encoder_embed_dim",
            "decoder_embed_dim",
            "model_dim",
            "d_embed",
            "projection_hidden_size",
            "output_dim",
        ],
        WIDTH,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
            "encoder_num_attention_heads",
            "decoder_num_attention_heads",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
        ],
        HEADS,
    ),
    **dict.fromkeys(
        [
            "head_dim",
            "d_kv",
            "kv_channels",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "d_head",
            "attention_head_dim",
        ],
        8,
    ),
    **dict.fromkeys(
        [
            "intermediate_size",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_ff",
            "ffn_dim",
            "n_inner",
            "mlp_dim",
            "d_inner",
            "ffn_hidden_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "encoder_intermediate_size",
            "decoder_intermediate_size",
            "feed_forward_hidden_size",
            "dense_intermediate_size",
            "mlp_hidden_size",
        ],
        48,
    ),
    **dict.fromkeys(
        [
            "max_position_embeddings",
            "n_positions",
            "max_source_positions",
            "max_target_positions",
            "max_seq_len",
            "n_ctx",
            "max_encoder_position_embeddings",
            "max_decoder_position_embeddings",
        ],
        64,
    ),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "num_mel_bins"], 16),
    **dict.fromkeys(["initializer_range", "init_std", "initializer_factor"], 0.2),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts"], 1),
    "image_size": IMAGE,
    "patch_size": PATCH,
    "window_size": 2,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "rotary_dim": 4,
    "emb_dim": WIDTH,
    "n_words": 99,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "context_size": 8,
    "moe_k": 2,
}

UNSET = {
    "id2label",
    "label2id",
    "transformers_version",
    "dtype",
    "out_features",
    "out_indices",
    "stage_names",
    "per_layer_config",
}
"""Fields that follow from others, or speak of layers that a small model has not."""


class NotBuiltError(Exception):
    """The general recipe does not build a tiny model of the family, or has no input for it."""


@dataclass(frozen=True)
class Verdict:
    """What happened to one family: seen, refused, wrong, or not built by the recipe."""

    family: str
    model: str
    outcome: str
    sites: int = 0
    error: float = 0.0  # the largest over all measures and heads
    measure: str = ""  # that has it
    why: str = ""


def families() -> dict[str, str]:
    """model type -> class of the bare model, as transformers' AutoModel knows them."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {name: found if isinstance(found, str) else found[0] for name, found in MODEL_MAPPING_NAMES.items()}


# ---- a tiny model and a batch ----


def shallow(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with few layers and a small vocabulary, and all other sizes as they are, so that they agree."""
    new: dict[str, Any] = {}
    for name, value in config.items():
        if name in UNSET:
            continue
        number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, Mapping):
            new[name] = shallow(value)
        elif isinstance(name, str) and number and (name in LAYER_FIELDS or name.endswith(("vocab_size", "token_id"))):
            new[name] = LAYERS if name in LAYER_FIELDS else 99 if name.endswith("vocab_size") else value % 90
        elif name in LAYER_LISTS and isinstance(value, list | tuple):
            new[name] = _some_layers(value)
        else:
            new[name] = value
    return new


LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


def _some_layers(kinds: Sequence[Any]) -> list[Any]:
    """Few layers, of different kinds if there are several."""
    return [*dict.fromkeys(kinds)][:LAYERS] if len({*kinds}) > 1 else list(kinds[:LAYERS])


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as a dictionary, with every size that is recognised by its name made small."""
    layers = next((config[name] for name in LAYER_FIELDS if isinstance(config.get(name), int)), None)
    new: dict[str, Any] = {}
    for name, value in config.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in UNSET:
            continue
        if not isinstance(name, str):
            new[name] = value
        elif isinstance(value, Mapping):
            new[name] = small(value)
            if name in ("rope_parameters", "rope_scaling"):  # sections of half of a head, ignored by most
                new[name].setdefault("mrope_section", [2, 1, 1])
        elif name in ("num_key_value_heads", "num_kv_heads", "n_head_kv") and number:
            heads = config.get("num_attention_heads", config.get("num_heads", value))
            new[name] = HEADS if value == heads else 1 if value == 1 else 2
        elif name in FIELDS and number:
            new[name] = FIELDS[name]
        elif name in FIELDS and isinstance(value, list | tuple) and name in ("image_size", "patch_size"):
            new[name] = [FIELDS[name]] * len(value)
        elif name.endswith("vocab_size") and number:
            new[name] = 99
        elif name.endswith(("token_id", "token_index")) and number:
            new[name] = int(value) % 90
        elif name in ("depths", "num_heads") and isinstance(value, list | tuple):
            new[name] = [1 if name == "depths" else 2] * len(value)
        elif name in LAYER_LISTS and isinstance(value, list | tuple):
            new[name] = _some_layers(value)
        elif name == "mrope_section":  # of half of a head
            new[name] = [2, 1, 1]
        elif value is None and name in ("head_dim", "vocab_size", "num_key_value_heads"):
            new[name] = {"head_dim": 8, "vocab_size": 99}.get(name, HEADS)
        elif isinstance(value, list | tuple) and layers is not None and len(value) == layers and layers > 4:
            new[name] = list(value[:LAYERS])
        else:
            new[name] = value
    return new


def build(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model of the family with random weights, and a batch of two sequences, the second one padded."""
    reasons = []
    for shrink in (small, shallow):
        try:
            return _build(family, shrink)
        except NotBuiltError as error:
            reasons.append(error)
    raise reasons[0]


def _build(family: str, shrink: Callable[[Mapping[str, Any]], dict[str, Any]]) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import CONFIG_MAPPING, AutoModel

    try:
        kind = CONFIG_MAPPING[family]
        config = kind(**shrink(kind().to_dict()))
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModel.from_config(config).parameters())
        if size > LARGEST:
            raise NotBuiltError(f"{size / 1e6:.0f} million parameters after shrinking")
        try:
            model = AutoModel.from_config(config, attn_implementation="sdpa")
        except ValueError as error:
            if "does not support" not in str(error):
                raise
            model = AutoModel.from_config(config, attn_implementation="eager")
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {_first_line(error)}") from error
    model = model.eval().float()
    reasons = []
    for batch in batches(model):
        try:
            with torch.no_grad():
                copy.deepcopy(model)(**batch)  # a failed attempt may leave something behind
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {_first_line(error)}")
        else:
            return model, batch
    raise NotBuiltError(f"no input ({reasons[0] if reasons else 'none for its arguments'})")


def batches(model: Any) -> Iterator[dict[str, Tensor]]:
    """Batches to try, from the names of the arguments of the model."""
    arguments, config = inspect.signature(model.forward).parameters, model.config
    torch.manual_seed(1)
    ids = torch.randint(3, 89, (2, TOKENS))
    keep = torch.ones(2, TOKENS, dtype=torch.long)
    keep[1, TOKENS - 6 :] = 0
    mels, channels = (_field(config, name, default) for name, default in (("num_mel_bins", 80), ("num_channels", 3)))
    side = _field(config, "image_size", IMAGE)
    side = side[0] if isinstance(side, list | tuple) else side
    text: dict[str, Tensor] = {"input_ids": ids, "attention_mask": keep}
    if "decoder_input_ids" in arguments:
        text["decoder_input_ids"] = torch.randint(3, 89, (2, 10))
    if "bbox" in arguments:
        text["bbox"] = torch.zeros(2, TOKENS, 4, dtype=torch.long)
    image = {"pixel_values": torch.randn(2, channels, side, side)}
    sounds: list[dict[str, Tensor]] = []
    for name in ("input_features", "input_values"):
        if name in arguments:
            sounds += [{name: torch.randn(2, *shape)} for shape in ((mels, 128), (mels, 64), (64, mels), (128, mels))]
            sounds += [{name: torch.randn(2, 4000)}, {name: torch.randn(2, 1, 4000)}]
            if "max_length" in config.to_dict():
                sounds.append({name: torch.randn(2, config.max_length, mels)})
    decoder = {"decoder_input_ids": text["decoder_input_ids"]} if "decoder_input_ids" in arguments else {}
    if "pixel_values" in arguments and "input_ids" in arguments:
        yield {**text, **image}
    if "input_ids" in arguments:
        yield text
        yield {name: x for name, x in text.items() if name != "attention_mask"}
    if "pixel_values" in arguments:
        yield image
        yield {"pixel_values": torch.randn(2, channels, 64, 64)}
        yield {"pixel_values": torch.randn(2, channels, 128, 128)}
        frames = _field(config, "num_frames", 2)
        yield {"pixel_values": torch.randn(2, frames, channels, side, side)}
    for name in ("pixel_values_videos", "pixel_values"):
        if name in arguments and "grid_thw" not in arguments:
            frames = _field(config, "frames_per_clip", 4)
            yield {name: torch.randn(1, frames, channels, side, side)}
    if "grid_thw" in arguments:  # two images as one list of 4 x 4 patches
        patch = _field(config, "patch_size", PATCH)
        name = "hidden_states" if "hidden_states" in arguments else "pixel_values"
        for depth in (_field(config, "temporal_patch_size", 1), 1):
            patches = torch.randn(32, depth * channels * patch * patch)
            yield {name: patches, "grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    yield from ({**sound, **decoder} for sound in sounds)
    if "input_features_mask" in arguments:
        shapes = ((mels, 128, 128), (64, mels, 64))
        yield from (
            {"input_features": torch.randn(2, a, b), "input_features_mask": torch.ones(2, length, dtype=torch.long)}
            for a, b, length in shapes
        )


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of a configuration or of one of its parts."""
    own = config.to_dict()
    found = [own.get(name), *(part.get(name) for part in own.values() if isinstance(part, dict))]
    return next((x for x in found if x is not None), default)


# ---- the dense computation ----


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one attention call in float64: (b, h, m, k), (b, h, n, k), (b, h, n, d), scores and mask."""

    q: Tensor
    k: Tensor
    v: Tensor | None  # None: not known
    scale: float
    visible: Tensor  # (b, h, m, n)
    bias: Tensor  # (b, h, m, n), 0 where hidden


LARGE = 5e3
"""Scores below its negative are masked, unless other scores are as large."""


def written_call(scores: Tensor, v: Tensor | None, sequences: int) -> Call:
    """P = softmax(scores) of (b h, m, n), (b, h, m, n), or with windows before or after the heads; v is (…, n, d)."""
    s = scores.detach().double()
    v = None if v is None else v.detach().double().expand(*s.shape[:-2], *v.shape[-2:])
    if s.dim() == 5 and s.shape[2] != HEADS:
        s, v = s.transpose(1, 2), None if v is None else v.transpose(1, 2)
    heads = s.shape[-3] if s.dim() > 3 else len(s) // sequences
    s = s.reshape(-1, heads, *s.shape[-2:])
    v = None if v is None else v.reshape(-1, heads, *v.shape[-2:])
    large = bool((s > LARGE).any()) or bool((s < -LARGE).all())
    visible = s > (-1e38 if large else -LARGE)
    zeros = [torch.zeros(*s.shape[:2], size, 1, dtype=torch.float64) for size in s.shape[-2:]]
    return Call(zeros[0], zeros[1], v, 1.0, visible, s.masked_fill(~visible, 0))


@contextlib.contextmanager
def written_out(calls: list[Call], sequences: int) -> Iterator[None]:
    """Add attention that is written out by hand inside the context to `calls`."""
    latest: list[tuple[Tensor, Tensor]] = []  # scores and weights of the latest softmax

    def softmax(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = original(x, *args, **kwargs)
            if out.dim() > 2 and torch.allclose(out.sum(-1).float(), torch.ones(()), atol=1e-2):
                latest[:] = [(x.detach().clone(), out.detach().clone())]
            return out

        return call

    def product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = original(*args, **kwargs)
            factors = [x for y in args for x in (y if isinstance(y, tuple | list) else (y,)) if isinstance(x, Tensor)]
            if latest and len(factors) == 2 and factors[0].shape[-2:] == latest[0][1].shape[-2:]:
                scores, weights = latest[0]
                w, v = factors
                if w.numel() == weights.numel() and torch.equal(w.float(), weights.reshape(w.shape).float()):
                    latest.clear()
                    known = v if original is not einsum else None
                    calls.append(written_call(scores.reshape(w.shape), known, sequences))
            return out

        return call

    einsum = torch.einsum
    places = [(softmax, F, "softmax"), (softmax, torch, "softmax"), (softmax, Tensor, "softmax")]
    places += [(product, torch, name) for name in ("matmul", "bmm", "einsum")]
    places += [(product, Tensor, name) for name in ("matmul", "bmm", "__matmul__")]
    before = [getattr(owner, name) for _, owner, name in places]
    for (replace, owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, replace(function))
    try:
        yield
    finally:
        for (_, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


@contextlib.contextmanager
def recorded(sequences: int = 2) -> Iterator[list[Call]]:
    """All attention calls inside the context."""
    calls: list[Call] = []
    original = F.scaled_dot_product_attention

    def record(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = (x.detach().double().reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        shape = (*q.shape[:-1], k.shape[-2])
        visible, bias = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
        if is_causal:
            visible = visible.tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            visible = (
                visible & attn_mask.reshape(-1, *attn_mask.shape[-3:]) if attn_mask.dim() > 3 else visible & attn_mask
            )
        elif attn_mask is not None:
            added = attn_mask.detach().double().expand(shape)
            visible, bias = visible & (added > -1e4), added.masked_fill(added <= -1e4, 0)
        calls.append(Call(q, k, v, q.shape[-1] ** -0.5 if scale is None else float(scale), visible, bias))
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def without_weights(*args: Any, **kwargs: Any) -> Any:
        """torch's own module calls the function for attention only if it need not return the weights."""
        bound = inspect.signature(multi_head).bind(*args, **kwargs)
        bound.arguments["need_weights"] = False
        return multi_head(*bound.args, **bound.kwargs)

    multi_head = F.multi_head_attention_forward
    replaced = {"scaled_dot_product_attention": record, "multi_head_attention_forward": without_weights}
    before = {name: getattr(F, name) for name in replaced}
    for name, function in replaced.items():
        setattr(F, name, function)
    try:
        with written_out(calls, sequences):
            yield calls
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def dense_measures(
    call: Call, b: int, kind: str = "self", real: Tensor | None = None
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Every measure of the heads of one call on sequence b from the whole P, and its size without padding.

    Tokens that are not `real` are padding, unless a real one attends to them.
    """
    visible = call.visible[b]
    square = kind == "self" and visible.shape[-1] == visible.shape[-2]
    keys = visible.any(-2).any(0)
    if square and real is not None:
        keys &= real | visible[:, real].any(1).any(0)
    queries = visible.any(-1).any(0) & (keys if square else torch.ones(visible.shape[-2], dtype=torch.bool))
    places = torch.arange(len(keys))[queries] if square else torch.arange(int(queries.sum()))
    j = torch.arange(len(keys))
    causal = not square and bool(
        (visible == torch.ones_like(visible).tril(visible.shape[-1] - visible.shape[-2])).all()
    )
    if causal and visible.shape[-2] > 1:
        places = places + visible.shape[-1] - visible.shape[-2]
    if square:
        before = keys.cumsum(0) - keys.long()
        places = before[places]
    else:
        j = torch.arange(int(keys.sum()))
    s = (call.scale * call.q[b] @ call.k[b].mT + call.bias[b]).masked_fill(~visible, -math.inf)
    s, visible = s[:, queries][..., keys], visible[:, queries][..., keys]
    v = None if call.v is None else call.v[b][:, keys]
    j = torch.arange(s.shape[-1])
    p = torch.softmax(s, -1).nan_to_num(0)
    h, m, n = p.shape
    entropy = torch.special.entr(p).sum(-1)
    largest = visible.sum(-1).clamp(min=1).double().log()
    offset = j - places[:, None]
    mean = (p * offset).sum((-2, -1)) / m
    deltas = range(int(offset.min()), int(offset.max()) + 1)
    on = [offset == delta for delta in deltas]
    energies = torch.stack([p[:, here].sum(-1).square() / max(1, int(here.sum())) for here in on], -1)
    norm = p.square().sum((-2, -1))
    best = energies.argmax(-1)
    weights = torch.stack([p[:, here].sum(-1) / m for here in on], -1)
    received, output, order = p.mean(-2), None if v is None else p @ v, entropy.sort(-1).values
    left, sigma, _ = torch.linalg.svd(p, full_matrices=False)
    share = sigma / sigma.sum(-1, keepdim=True)
    within = {w: p[:, offset.abs() <= w].sum(-1) / m for w in (1, 4, 16, 64)}
    found = {
        "effective_rank": torch.special.entr(share).sum(-1).exp(),
        "stable_rank": norm / sigma[:, 0].square(),
        "sigma_1": sigma[:, 0],
        "sigma_ratio": sigma[:, 1] / sigma[:, 0] if sigma.shape[-1] > 1 else torch.zeros(h),
        "entropy": entropy.mean(-1),
        "entropy_min": order[:, 0],
        "entropy_q10": order[:, round(0.1 * (m - 1))],
        "entropy_median": order[:, (m - 1) // 2],
        "entropy_q90": order[:, round(0.9 * (m - 1))],
        "entropy_share": torch.where(largest > 0, entropy / largest.clamp(min=1e-9), 1.0).mean(-1),
        "distance_to_uniform": (largest - entropy).mean(-1),
        "largest_score": s.amax((-2, -1)),
        "row_maximum": p.amax(-1).mean(-1),
        "frobenius": norm.sqrt(),
        "sink_mass": received.amax(-1),
        "first_mass": received[:, 0],
        "diagonal_mass": p[:, offset == 0].sum(-1) / m,
        "previous_mass": p[:, offset == -1].sum(-1) / m,
        "next_mass": p[:, offset == 1].sum(-1) / m,
        **{f"mass_within_{w}": x for w, x in within.items()},
        "offset_mean": mean,
        "offset_spread": ((p * offset.square()).sum((-2, -1)) / m - mean.square()).clamp(min=0).sqrt(),
        "best_offset_mass": weights.gather(-1, best[:, None])[:, 0],
        "best_offset_error": (1 - energies.amax(-1) / norm).clamp(min=0).sqrt(),
        "toeplitz_error": (1 - energies.sum(-1) / norm).clamp(min=0).sqrt(),
    }
    if v is not None and output is not None:
        found.update(output_norm=torch.linalg.matrix_norm(output), value_norm=torch.linalg.matrix_norm(v))
    for r in (8, 16, 32):
        enough = r >= min(m, n)
        found[f"energy_{r}"] = torch.ones(h) if enough else sigma[:, :r].square().sum(-1) / norm
        if output is not None:
            found[f"output_error_{r}"] = torch.zeros(h) if enough else _rank_errors(left, sigma, output, r)
    return found, (m, n)


def _rank_errors(left: Tensor, sigma: Tensor, output: Tensor, r: int) -> Tensor:
    """||(P - P_r) V|| / ||P V||; equal singular values share what they carry."""
    errors = []
    for u, s, o in zip(left, sigma, output, strict=True):
        carried = (u.mT @ o).square().sum(-1)
        tied = (s - s[r - 1]).abs() < 1e-6 * s[0]
        above = (s > s[r - 1]) & ~tied
        kept = carried[above].sum() + carried[tied].mean() * (r - int(above.sum()))
        errors.append((1 - kept / carried.sum()).clamp(min=0).sqrt())
    return torch.stack(errors)


ROOTS = {"toeplitz_error", "best_offset_error", "output_error_8", "output_error_16", "output_error_32", "offset_spread"}
"""Roots of differences: what single precision leaves of them is compared before the root."""


def distance(name: str, found: Tensor, expected: Tensor) -> float:
    """Largest relative error; absolute below 0.1."""
    if name in ROOTS:
        found, expected = found.square(), expected.square()
    return ((found - expected).abs() / expected.abs().clamp(min=0.1)).max().item()


# ---- one family ----


def verdict(family: str, model_class: str) -> Verdict:
    """Examine the family and compare every measure with the dense computation."""
    from headwise.errors import HeadwiseError
    from headwise.examination.measure.observe import observe
    from headwise.models.unseen import unseen_attention

    try:
        model, batch = build(family)
    except NotBuiltError as error:
        return Verdict(family, model_class, "not built", why=str(error))
    torch.manual_seed(2)  # some models draw random numbers when they run
    with torch.no_grad(), recorded() as calls:
        model(**batch)
    torch.manual_seed(2)
    try:
        found = observe(model, batch)
    except HeadwiseError as error:
        return Verdict(family, model_class, "refused", len(calls), why=str(error))
    except NotBuiltError:
        raise
    except Exception as error:
        return Verdict(family, model_class, "wrong", len(calls), why=f"{type(error).__name__}: {_first_line(error)}")
    worst, where, real = 0.0, "", None
    if not getattr(model.config, "is_encoder_decoder", False):  # otherwise it says nothing of the decoder
        real = batch.get("attention_mask")
    for b, one in enumerate(found):
        mine = [call for call in calls if len(call.q) > b]
        if len(one.sites) > len(mine):
            why = f"{len(one.sites) - len(mine)} of {len(one.sites)} attention calls are not recorded by the test"
            return Verdict(family, model_class, "not compared", len(calls), why=why)
        if len(one.sites) < len(mine) and (unseen := unseen_attention(model, batch)):
            names = ", ".join(x["name"] for x in unseen)
            return Verdict(family, model_class, "not compared", len(calls), why=f"listed as not seen: {names}")
        if len(one.sites) != len(mine):
            return Verdict(family, model_class, "wrong", len(calls), why=f"{len(one.sites)} sites, {len(mine)} calls")
        start, measured = 0, {**one.numbers, **one.spectral}
        for site, lengths, call in zip(one.sites, one.lengths, mine, strict=True):
            expected, size = over_windows(call, b, len(found), site.kind, real)
            if size != lengths:
                return Verdict(family, model_class, "wrong", len(calls), why=f"{site.name}: {lengths}, not {size}")
            for name, values in expected.items():
                error = distance(name, measured[name][start : start + site.heads], values.double())
                if not error <= worst:
                    worst, where = error, name
            start += site.heads
    outcome = "seen" if worst < 1e-4 else "wrong"
    return Verdict(family, model_class, outcome, len(calls), worst, where)


def over_windows(
    call: Call, b: int, sequences: int, kind: str, attention_mask: Tensor | None
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Measures of sequence b: means over its windows, where the model cuts a sequence into windows."""
    windows = len(call.q) // sequences if len(call.q) % sequences == 0 else 1
    real = None
    if attention_mask is not None and attention_mask.shape == (len(call.q), call.visible.shape[-1]):
        real = attention_mask[b].bool()
    each = [dense_measures(call, b * windows + w, kind, real) for w in range(windows)]
    means = {name: torch.stack([numbers[name].double() for numbers, _ in each]).mean(0) for name in each[0][0]}
    sizes = [size for _, size in each]
    return means, (max(m for m, _ in sizes), max(n for _, n in sizes))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:100]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise NotBuiltError(f"takes more than {seconds} seconds of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def examine_families(names: list[str]) -> list[Verdict]:
    """One verdict for each family, in this process."""
    torch.set_num_threads(1)
    known, verdicts = families(), []
    for name in names:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                with time_limit(SECONDS):
                    verdicts.append(verdict(name, known[name]))
            except NotBuiltError as error:
                verdicts.append(Verdict(name, known[name], "not built", why=str(error)))
    return verdicts


def in_a_process(names: list[str]) -> list[Verdict]:
    """The same in a process of its own, so that memory and imports of many families do not add up."""
    command = [sys.executable, "-m", "tests.examination.families", "--json", *names]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PAGE.parents[2])
    return [Verdict(**row) for row in json.loads(out.stdout.splitlines()[-1])]


def _escaped(text: str) -> str:
    return text.replace("|", " ").replace("[", "\\[").replace("]", "\\]")


def table(verdicts: list[Verdict]) -> str:
    """The Markdown tables of the page."""
    lines = []
    for outcome in ("seen", "not compared", "refused", "wrong", "not built"):
        rows = [x for x in verdicts if x.outcome == outcome]
        lines += [f"## {outcome.capitalize()}: {len(rows)}", ""]
        if outcome == "seen":
            lines += ["| family | model | attention calls | largest error | of |", "|---|---|---|---|---|"]
            lines += [f"| {x.family} | {x.model} | {x.sites} | {x.error:.0e} | `{x.measure}` |" for x in rows]
        elif rows:
            lines += ["| family | model | why |", "|---|---|---|"]
            lines += [f"| {x.family} | {x.model} | {_escaped(x.why)} |" for x in rows]
        lines.append("")
    return "\n".join(lines).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    names = options.families or sorted(families())
    if options.write:
        verdicts = [x for start in range(0, len(names), 50) for x in in_a_process(names[start : start + 50])]
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(START)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{START}\n{table(verdicts)}\n{END}{after}", encoding="utf-8")
        return
    verdicts = examine_families(names)
    if options.json:
        print(json.dumps([asdict(x) for x in verdicts]))
        return
    for x in verdicts:
        print(f"{x.family:24s} {x.outcome:10s} {x.sites:3d} {x.error:.1e} {x.measure} {x.why}", flush=True)


if __name__ == "__main__":
    main()
