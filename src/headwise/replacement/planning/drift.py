"""How far the output of a model moves when some of its heads are replaced: measured, not predicted.

    drift = 1 - cos(mean of the final states, the same before)       encoders
    drift = |loss per token - loss per token before|                 language models

Layers before the first replaced one compute the same as before, so their outputs are stored and reused: a change in the
last layer costs one layer, not the model.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.intercept import intercept, read_sdpa
from headwise.models.run import OwnHook, as_it_was, run_model
from headwise.replacement.planning.saved_progress import DriftEstimate

Replacement = Callable[..., Tensor]
"""(q, k, v, key_mask=, causal=, scale=) -> output of a site, such as MixedHeads."""

Measure = Callable[[nn.Module, Any, Any], Tensor]
"""(model, batch, output) -> what is compared: states (b, width), or losses (b,)."""


class DriftTrial:
    """A model, some batches, and its outputs for them."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], measure: Measure, sites: Sequence[str]) -> None:
        self.model, self.batches, self.measure = model, list(batches), measure
        self.layers = layers_of(model, sites)
        self._replacements: Mapping[str, Replacement] = {}
        self._order: list[nn.Module] = []
        self._outputs: list[dict[nn.Module, Any]] = []  # of each layer, for each batch
        self._before: list[Tensor] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[DriftTrial]:
        """Measure while open; the model is in eval mode and restored afterwards."""
        with as_it_was(self.model), torch.no_grad(), intercept(self.model, answer=self._answer):
            self._outputs, self._before = [], []
            for batch in self.batches:
                self._run_unchanged(batch)
            yield self

    def drifts(
        self, replacements: Mapping[str, Replacement], *, batches: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Drifts (texts,) with these sites replaced, on the first `batches`; and the directions (texts, width) in
        which states moved, None for losses."""
        drifts, directions = [], []
        for index, batch in enumerate(self.batches[:batches]):
            self._replacements = replacements
            try:
                with self._early_layers_reused(replacements, index):
                    output = run_model(self.model, without_cache(self.model, batch))
            finally:
                self._replacements = {}
            after = self.measure(self.model, batch, output)
            drifts.append(difference(self._before[index], after))
            directions += [] if after.dim() == 1 else [direction(self._before[index], after)]
        return torch.cat(drifts), torch.cat(directions) if directions else None

    def estimate(self, replacements: Mapping[str, Replacement], *, batches: int | None = None) -> DriftEstimate:
        """Mean drift and its standard error; a drift that is not finite counts as 1e9."""
        drifts, directions = self.drifts(replacements, batches=batches)
        mean = float(drifts.mean())
        error = float(drifts.std() / math.sqrt(len(drifts))) if len(drifts) > 1 else 0.0
        if not math.isfinite(mean + error):
            mean, error = 1e9, 0.0
        return DriftEstimate(mean, error, directions)

    def _answer(self, site: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        replacement = self._replacements.get(site)
        if replacement is None:
            return original(*call, **options)
        q, k, v, mask, scale = read_sdpa(*call, **options)
        out = replacement(q, k, v, key_mask=mask.key_mask, causal=mask.causal, scale=scale)
        return out.reshape(*call[0].shape[:-1], out.shape[-1])

    def _run_unchanged(self, batch: Any) -> None:
        """Store the output of every layer and of the model."""
        ran: list[tuple[nn.Module, Any]] = []

        def store(module: nn.Module, args: tuple, output: Any) -> None:
            ran.append((module, output))

        with contextlib.ExitStack() as hooks:
            for layer in dict.fromkeys(self.layers.values()):
                hooks.enter_context(layer.register_forward_hook(OwnHook(store)))
            output = run_model(self.model, without_cache(self.model, batch))
        if len(dict(ran)) < len(ran):  # a layer that runs twice has two outputs
            self.layers, ran = {}, []
        self._order = [layer for layer, _ in ran]
        self._outputs.append(dict(ran))
        self._before.append(self.measure(self.model, batch, output))

    @contextlib.contextmanager
    def _early_layers_reused(self, replacements: Mapping[str, Replacement], index: int) -> Iterator[None]:
        """Layers before the first replaced one return their stored outputs."""
        changed = {self.layers.get(site) for site in replacements}
        first = next((i for i, layer in enumerate(self._order) if layer in changed), 0)
        early = [] if None in changed else self._order[:first]
        with contextlib.ExitStack() as stored:
            for layer in early:
                stored.enter_context(_returning(layer, self._outputs[index][layer]))
            yield


class _StoredForward:
    """A forward that returns a stored output in the threads that have one, and computes it in all others."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward, self.on_instance = layer.forward, layer.__dict__.get("forward")
        self.outputs: dict[int, Any] = {}  # by thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        return self.outputs[thread] if thread in self.outputs else self.forward(*args, **kwargs)


_LAYERS = threading.Lock()
"""Held while a layer gets or loses a _StoredForward, so that the last thread restores what the first one found."""


@contextlib.contextmanager
def _returning(layer: nn.Module, output: Any) -> Iterator[None]:
    """`layer` returns `output` in this thread; a forward that was set on the instance is restored, not deleted."""
    thread = threading.get_ident()
    try:
        with _LAYERS:
            forward = layer.__dict__.get("forward")
            stored = forward if isinstance(forward, _StoredForward) else _StoredForward(layer)
            stored.outputs[thread] = output
            layer.__dict__["forward"] = stored
        yield
    finally:
        with _LAYERS:
            stored = layer.__dict__.get("forward")
            if isinstance(stored, _StoredForward):
                stored.outputs.pop(thread, None)
                if not stored.outputs and stored.on_instance is None:
                    del layer.__dict__["forward"]
                elif not stored.outputs:
                    layer.__dict__["forward"] = stored.on_instance


def without_cache(model: nn.Module, batch: Any) -> Any:
    """The batch with use_cache=False for a model that would keep keys and values: stored layers have none."""
    caching = getattr(getattr(model, "config", None), "use_cache", None)
    if not caching or not isinstance(batch, Mapping) or "use_cache" in batch:
        return batch
    accepted = inspect.signature(model.forward).parameters
    takes = "use_cache" in accepted or any(x.kind is x.VAR_KEYWORD for x in accepted.values())
    return {**batch, "use_cache": False} if takes else batch


def layers_of(model: nn.Module, sites: Sequence[str]) -> dict[str, nn.Module]:
    """The member of a ModuleList that contains each site; empty if some site is in none."""
    modules = dict(model.named_modules())
    layers = {}
    for site in sites:
        parts = site.partition("@")[0].split(".")
        above = [".".join(parts[: i + 1]) for i in range(len(parts))]
        inside = [name for name in above if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)]
        if not inside:
            return {}
        layers[site] = modules[inside[0]]
    return layers


def difference(before: Tensor, after: Tensor) -> Tensor:
    """(texts,): |difference| of losses (b,), or 1 - cosine of states (b, width); 0 for texts that are all masked."""
    if before.dim() == 1:
        return (after - before).abs().double()
    nothing = (before == 0).all(-1) & (after == 0).all(-1)
    return (1 - F.cosine_similarity(before.double(), after.double(), dim=-1)).masked_fill(nothing, 0)


def direction(before: Tensor, after: Tensor) -> Tensor:
    """(after - before) / |before| without its part along `before`; half its square is the drift if that is small."""
    length = before.norm(dim=-1, keepdim=True)
    length = length.masked_fill(length == 0, 1)  # a text that is all masked does not move
    unit, moved = before / length, (after - before) / length
    return moved - (moved * unit).sum(-1, keepdim=True) * unit


def measure_for(model: nn.Module, batch: Any, *, causal: bool) -> tuple[Measure, str]:
    """What is compared, and its name: losses of decoders with a language-model head, states of all other models."""
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
        x = getattr(output, name, None)
        if isinstance(x, Tensor):
            return x
    values = output.values() if isinstance(output, Mapping) else output
    for x in values:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x
    raise InputError(f"the model returned a {type(output).__name__}, which holds no floating-point tensor to compare")
