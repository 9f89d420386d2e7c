"""q, k, v and P v of every attention call of a model on some batches: what replacements are fitted to.

A few sites at a time, as many as a budget of memory allows: a long text through a deep model has gigabytes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.models.intercept import intercept, nothing_seen
from headwise.models.run import run_model
from headwise.models.sdpa_masks import as_four, read_call


@final
@dataclass(frozen=True, eq=False)
class Attention:
    """One call: q (b, h, m, k), k and v (b, h or fewer, n, ·), `keep` (b, n) True at real keys, out (b, h, m, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None
    causal: bool
    scale: float
    out: Tensor

    @property
    def real(self) -> Tensor | None:
        """(b, 1, m, 1): queries that count, where queries are the keys' positions."""
        return None if self.keep is None else self.keep[:, None, :, None]


@final
@dataclass(frozen=True)
class Site:
    """A place where attention is computed; `why_not` says why its heads have to stay as they are."""

    name: str
    heads: int
    width: int
    length: int
    causal: bool
    numbers: int  # in q, k, v and out
    why_not: str | None = None


def sites(model: nn.Module, batch: Any) -> dict[str, Site]:
    """Every call site in the order of the forward pass, or a sentence if there is none."""
    found: dict[str, Site] = {}

    def answer(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        out = original(*call, **options)
        q, k, v, seen, _ = read_call(*call, **options)
        reason = None
        if seen.full is not None:
            reason = "its mask is neither padding nor causal"
        elif q.shape[-2] != k.shape[-2]:
            reason = f"it has {q.shape[-2]} queries for {k.shape[-2]} keys, and plans are for self-attention"
        elif v.shape[-1] != q.shape[-1]:
            reason = f"its values are {v.shape[-1]} wide and its keys {q.shape[-1]}"
        base = name.partition("@")[0]
        if base != name:
            reason = "its module is used several times in a pass"
            found[base] = _because(found[base], reason)
        numbers = q.numel() + k.numel() + v.numel() + out.numel()
        found[name] = Site(name, q.shape[1], q.shape[-1], k.shape[-2], seen.causal, numbers, reason)
        return out

    with torch.no_grad(), intercept(model, answer=answer):
        run_model(model, batch)
    if not found:
        raise nothing_seen(model)
    return found


def capture(model: nn.Module, batches: Sequence[Any], names: Collection[str]) -> dict[str, list[Attention]]:
    """What passes through the named sites, batch after batch; half precision as float32, to be fitted to."""
    seen: dict[str, list[Attention]] = {name: [] for name in names}

    def answer(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        out = original(*call, **options)
        if name in seen:
            q, k, v, mask, scale = read_call(*call, **options)
            full = torch.promote_types(q.dtype, torch.float32)
            q, k, v, kept = (x.detach().to(full).contiguous() for x in (q, k, v, as_four(out)))
            seen[name].append(_real_first(Attention(q, k, v, mask.keep, mask.causal, scale, kept)))
        return out

    with torch.no_grad(), intercept(model, answer=answer):
        for batch in batches:
            run_model(model, batch)
    return seen


def in_portions(found: Mapping[str, Site], batches: int, budget: int) -> list[list[str]]:
    """Names of sites, so many together that what passes through them on all batches stays within `budget` bytes."""
    portions: list[list[str]] = []
    room = 0
    for site in found.values():
        size = 4 * site.numbers * batches
        if not portions or size > room:
            portions.append([])
            room = budget
        portions[-1].append(site.name)
        room -= size
    return portions


def _real_first(x: Attention) -> Attention:
    """Padding before the first real key moved behind the last: replacements count positions from the first real one."""
    if x.keep is None or bool(x.keep[:, 0].all()):
        return x
    n = x.keep.shape[-1]
    turn = (torch.arange(n, device=x.keep.device) + x.keep.int().argmax(-1, keepdim=True)) % n
    q, k, v, out = (y.gather(2, turn[:, None, :, None].expand_as(y)) for y in (x.q, x.k, x.v, x.out))
    return Attention(q, k, v, x.keep.gather(-1, turn), x.causal, x.scale, out)


def _because(site: Site, reason: str) -> Site:
    return Site(site.name, site.heads, site.width, site.length, site.causal, site.numbers, reason)
