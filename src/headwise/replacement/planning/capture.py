"""Record q, k, v and the output of every attention call of a model on some batches, to fit replacements to.

Sites are recorded in groups that fit into a memory budget: a long text through a deep model has gigabytes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.models.intercept import four_axes, intercept, nothing_seen, read_sdpa
from headwise.models.run import run_model
from headwise.replacement.install.mixed_heads import along, is_padding_or_causal, padding_last
from headwise.replacement.kinds import AttentionSample, HeadInputs

SiteRecording = tuple[str, Callable[[], list[list[AttentionSample]]]]
"""A site, and a function that returns its samples on each of the given lists of batches."""


@final
@dataclass(frozen=True)
class AttentionSite:
    """A module that computes attention; `skipped` says why its heads cannot be replaced."""

    name: str
    heads: int
    width: int
    length: int
    causal: bool
    numbers: int  # in q, k, v and the output of one call
    skipped: str | None = None


def find_sites(model: nn.Module, batch: Any) -> dict[str, AttentionSite]:
    """Every site in the order of the forward pass; raises InterceptionError if there is none."""
    sites: dict[str, AttentionSite] = {}

    def answer(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        out = original(*call, **options)
        q, k, v, mask, _ = read_sdpa(*call, **options)
        reason = None
        if not is_padding_or_causal(mask):
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
        numbers = q.numel() + k.numel() + v.numel() + out.numel()
        sites[name] = AttentionSite(name, q.shape[1], q.shape[-1], k.shape[-2], mask.causal, numbers, reason)
        return out

    with torch.no_grad(), intercept(model, answer=answer):
        run_model(model, batch)
    if not sites:
        raise nothing_seen(model)
    return sites


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


def recordings(
    model: nn.Module, sites: Mapping[str, AttentionSite], parts: Sequence[Sequence[Any]], budget: int
) -> Iterator[SiteRecording]:
    """(site, samples) for every site; samples() returns its samples on each of `parts`, which are lists of batches.

    Sites are recorded in groups that fit into `budget` bytes, when samples() is first called in a group.
    """
    for names in in_portions(sites, sum(map(len, parts)), budget):
        recorded: list[dict[str, list[AttentionSample]]] = []
        for index, name in enumerate(names):

            def samples(name: str = name, left: Sequence[str] = names[index:], recorded: list = recorded) -> list:
                if not recorded:
                    recorded.extend(capture(model, part, left) for part in parts)
                return [of_site[name] for of_site in recorded]

            yield name, samples
            for of_site in recorded:
                del of_site[name]


def in_portions(sites: Mapping[str, AttentionSite], batches: int, budget: int) -> list[list[str]]:
    """Group sites so that their samples on all batches fit into `budget` bytes."""
    portions: list[list[str]] = []
    room = 0
    for site in sites.values():
        size = 4 * site.numbers * batches
        if not portions or size > room:
            portions.append([])
            room = budget
        portions[-1].append(site.name)
        room -= size
    return portions
