"""How far a model's answer moves when some of its heads are replaced: measured, not predicted.

    drift = 1 - cos(mean of the final states, the same before)       encoders
    drift = |loss per token - loss per token before|                 language models

Layers before the first replaced one compute what they computed before, so their answers are kept and handed out again:
a change in the last layer costs one layer, not the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.intercept import intercept
from headwise.models.run import run_model
from headwise.models.sdpa_masks import read_call

Replace = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float, Callable[[], Tensor]], Tensor]
"""(q, k, v, keep, causal, scale, exact) -> what a site answers; exact() is what it answered before."""

Measure = Callable[[nn.Module, Any, Any], Tensor]
"""(model, batch, output) -> what is compared: states (b, width), or losses (b,)."""


class Trial:
    """A model, some batches, and its answers to them."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], measure: Measure, sites: Sequence[str]) -> None:
        self.model, self.batches, self.measure = model, list(batches), measure
        self.layers = layers_of(model, sites)
        self._active: Mapping[str, Replace] = {}
        self._order: list[nn.Module] = []
        self._kept: list[dict[nn.Module, Any]] = []
        self._before: list[Tensor] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[Trial]:
        """Measures while open; the model is in eval mode and is given back as it was."""
        was_training, caching = self.model.training, getattr(getattr(self.model, "config", None), "use_cache", None)
        self.model.eval()
        if caching:
            self.model.config.use_cache = False  # type: ignore[union-attr]
        try:
            with torch.no_grad(), intercept(self.model, answer=self._answer):
                self._kept, self._before = [], []
                self._remember()
                yield self
        finally:
            self.model.train(was_training)
            if caching:
                self.model.config.use_cache = caching  # type: ignore[union-attr]

    def drift(self, replaced: Mapping[str, Replace], *, first: int | None = None) -> Tensor:
        """(texts,) drifts of the first so many batches with these sites answered by others."""
        return self.moved(replaced, first=first)[0]

    def moved(self, replaced: Mapping[str, Replace], *, first: int | None = None) -> tuple[Tensor, Tensor | None]:
        """The drifts, and which way the answers went: (texts, width) for states, None for losses."""
        found, ways = [], []
        for index in range(len(self.batches) if first is None else min(first, len(self.batches))):
            self._active = replaced
            try:
                with self._shortened(replaced, index):
                    output = run_model(self.model, self.batches[index])
            finally:
                self._active = {}
            after = self.measure(self.model, self.batches[index], output)
            found.append(difference(self._before[index], after))
            ways += [] if after.dim() == 1 else [way(self._before[index], after)]
        return torch.cat(found), torch.cat(ways) if ways else None

    def _answer(self, name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        replace = self._active.get(name)
        if replace is None:
            return original(*call, **options)
        q, k, v, seen, scale = read_call(*call, **options)
        out = replace(q, k, v, seen.keep, seen.causal, scale, lambda: original(*call, **options))
        return out.reshape(*call[0].shape[:-1], out.shape[-1])

    def _remember(self) -> None:
        for batch in self.batches:
            kept: dict[nn.Module, Any] = {}
            order: list[nn.Module] = []

            def keep(module: nn.Module, args: tuple, output: Any, kept: dict = kept, order: list = order) -> None:
                order.append(module)
                kept[module] = output

            handles = [layer.register_forward_hook(keep) for layer in dict.fromkeys(self.layers.values())]
            try:
                output = run_model(self.model, batch)
            finally:
                for handle in handles:
                    handle.remove()
            if len(set(order)) < len(order):  # a layer that runs twice has two answers
                self.layers = {}
                kept = {}
            self._order = order
            self._kept.append(kept)
            self._before.append(self.measure(self.model, batch, output))

    @contextlib.contextmanager
    def _shortened(self, replaced: Mapping[str, Replace], index: int) -> Iterator[None]:
        """Layers that end before the first replaced one begins hand out what they answered before."""
        changed = {self.layers.get(name) for name in replaced}
        place = next((i for i, layer in enumerate(self._order) if layer in changed), 0)
        early = [] if None in changed else self._order[:place]
        for layer in early:
            layer.forward = _always(self._kept[index][layer])  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in early:
                del layer.forward


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def layers_of(model: nn.Module, sites: Sequence[str]) -> dict[str, nn.Module]:
    """site -> the member of a ModuleList that it lies in; empty if some site lies in none."""
    modules = dict(model.named_modules())
    found = {}
    for site in sites:
        parts = site.partition("@")[0].split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        inside = [name for name in above if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)]
        if not inside:
            return {}
        found[site] = modules[inside[0]]
    return found


def difference(before: Tensor, after: Tensor) -> Tensor:
    """(texts,): of losses (b,) the distance, of states (b, width) one minus the cosine, 0 for a text all masked."""
    if before.dim() == 1:
        return (after - before).abs().double()
    nothing = (before == 0).all(-1) & (after == 0).all(-1)
    return (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).masked_fill(nothing, 0)


def way(before: Tensor, after: Tensor) -> Tensor:
    """(after - before) / |before| without its part along `before`; half its square is the drift while that is small."""
    length = before.norm(dim=-1, keepdim=True)
    length = length.masked_fill(length == 0, 1)  # a text all masked goes nowhere
    unit, moved = before / length, (after - before) / length
    return moved - (moved * unit).sum(-1, keepdim=True) * unit


def measure_for(model: nn.Module, batch: Any, *, causal: bool) -> tuple[Measure, str]:
    """What a model's answer is judged by, and its name: a decoder that can tell its loss by that, others by states."""
    if causal and isinstance(batch, Mapping) and "input_ids" in batch:
        config = getattr(model, "config", None)
        tied = bool(getattr(config, "tie_word_embeddings", False)) and hasattr(model, "get_input_embeddings")
        if tied or hasattr(model, "lm_head"):
            return token_loss, "loss"
    return pooled_states, "cosine"


def pooled_states(model: nn.Module, batch: Any, output: Any) -> Tensor:
    """The mean of the final states over real tokens: (b, width)"""
    states = _tensor(output, ("last_hidden_state", "hidden_states", "logits")).float()
    if states.dim() < 3:
        return states
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.shape != states.shape[:2]:
        return states.flatten(1, -2).mean(1)
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


def token_loss(model: nn.Module, batch: Any, output: Any) -> Tensor:
    """Mean loss per predicted token: (b,); from logits, or from states through the tied embedding, in blocks."""
    ids = batch["input_ids"]
    logits = getattr(output, "logits", None)
    source = logits if logits is not None else _tensor(output, ("last_hidden_state",))
    weight = None if logits is not None else model.get_input_embeddings().weight  # type: ignore[operator]
    total, count = source.new_zeros(ids.shape[0], dtype=torch.float64), 0
    for start in range(0, ids.shape[1] - 1, 256):
        stop = min(start + 256, ids.shape[1] - 1)
        part = source[:, start:stop].float()
        scores = part if weight is None else part @ weight.float().mT
        losses = F.cross_entropy(scores.flatten(0, 1), ids[:, start + 1 : stop + 1].flatten(), reduction="none")
        total += losses.double().view(ids.shape[0], -1).sum(-1)
        count += stop - start
    return total / max(1, count)


def _tensor(output: Any, names: Sequence[str]) -> Tensor:
    if isinstance(output, Tensor):
        return output
    for name in names:
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    values = output.values() if isinstance(output, Mapping) else output
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    raise InputError(f"the model answered with {type(output).__name__}, which holds no tensor to compare")
