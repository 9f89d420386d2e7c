"""Find the attention of a model, and record q, k, v and the output of its calls, to fit replacements to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.models.intercept import four_axes, intercept, nothing_seen, read_sdpa
from headwise.models.run import run_model
from headwise.replacement.install.mixed_heads import along, is_padding_or_causal, padding_last
from headwise.replacement.kinds import AttentionSample, HeadInputs


@final
@dataclass(frozen=True)
class AttentionSite:
    """A module that computes attention; `skipped` says why its heads cannot be replaced."""

    name: str
    heads: int
    key_value_heads: int
    width: int
    length: int
    causal: bool
    skipped: str | None = None


def find_sites(model: nn.Module, batch: Any) -> dict[str, AttentionSite]:
    """Every site in the order of the forward pass; raises InterceptionError if there is none."""
    sites: dict[str, AttentionSite] = {}

    def answer(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        out = original(*call, **options)
        q, k, v, mask, _ = read_sdpa(*call, **options)
        reason = None
        if mask.attn_bias is not None:
            reason = "a bias is added to its scores"
        elif not is_padding_or_causal(mask):
            reason = "its mask is neither padding nor causal"
        elif q.shape[-2] != k.shape[-2]:
            reason = f"it has {q.shape[-2]} queries for {k.shape[-2]} keys, and plans are for self-attention"
        elif (call[0] if call else options["query"]).dim() == 3:
            reason = "its heads share an axis with the batch, and plans are for operands (b, h, n, width)"
        elif v.shape[-1] != q.shape[-1]:
            reason = f"its values are {v.shape[-1]} wide and its keys {q.shape[-1]}"
        base = name.partition("@")[0]
        if base != name:
            reason = "its module is used several times in a pass"
            sites[base] = replace(sites[base], skipped=reason)
        sites[name] = AttentionSite(name, q.shape[1], k.shape[1], q.shape[-1], k.shape[-2], mask.causal, reason)
        return out

    with torch.no_grad(), intercept(model, answer=answer):
        run_model(model, batch)
    if not sites:
        raise nothing_seen(model)
    return sites


def layers_of(model: nn.Module, sites: Sequence[str]) -> dict[str, nn.Module]:
    """The member of a ModuleList that contains each site; empty if some site is in none, or is one, or is used again.

    Where a layer is recomputed, its forward is called on its own: only modules inside of it are called by their names.
    """
    modules = dict(model.named_modules())
    layers = {}
    for site in sites:
        parts = site.split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts) - 1)]
        inside = [name for name in above if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)]
        if not inside or "@" in site:
            return {}
        layers[site] = modules[inside[0]]
    return layers


def capture(model: nn.Module, batches: Sequence[Any], names: Collection[str]) -> dict[str, list[AttentionSample]]:
    """The calls at the named sites, one sample per batch, in float32 or better; padding comes last."""
    samples: dict[str, list[AttentionSample]] = {name: [] for name in names}

    def answer(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        out = original(*call, **options)
        if name in samples:
            q, k, v, mask, scale = read_sdpa(*call, **options)
            dtype = torch.promote_types(q.dtype, torch.float32)
            q, k, v, output = (x.detach().to(dtype).contiguous() for x in (q, k, v, four_axes(out)))
            samples[name].append(_sample(HeadInputs(q, k, mask, scale), v, output))
        return out

    with torch.no_grad(), intercept(model, answer=answer):
        for batch in batches:
            run_model(model, batch)
    return samples


def _sample(inputs: HeadInputs, v: Tensor, output: Tensor) -> AttentionSample:
    """With padding moved behind the real keys, because replacements count positions from the first real key."""
    if inputs.mask.key_mask is None or bool(inputs.mask.key_mask[..., 0].all()):
        return AttentionSample(inputs, v, output)
    padding = inputs.mask.key_mask[:, 0].int().argmax(-1, keepdim=True).expand(len(v), 1)
    turned, v, _ = padding_last(inputs, v, padding)
    forth = (torch.arange(inputs.n, device=v.device) + padding) % inputs.n
    return AttentionSample(turned, v, along(output, forth))
