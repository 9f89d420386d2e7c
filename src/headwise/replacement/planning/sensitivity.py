"""How far each candidate at each head moves the answer, from one forward and backward pass a text.

    x_s(h, c) = <g_s, Delta_s>      Delta = P~ v - P v, the change of the output of head h at position s
    g = d answer / d output of the head

Language models: the answer is the loss of labels drawn from the model itself, so that E[g g^T] is the Fisher form of
its predictions, and 1/2 mean_s x_s^2 is the divergence KL(before || after) per token.  Other models: the answer is a
random direction z across the pooled state u / |u|, so that E[(z . t)^2] = |t|^2 for the direction t in which the state
moves, and 1 - cos = |t|^2 / 2.  The x of all replaced heads are added before they are squared: heads that err alike
drift more together than alone.

Layers of a language model are recomputed in the backward pass, one at a time, and candidates are applied there: no
activation of a whole model is kept, and no candidate needs a pass of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwise.models.intercept import SdpaArguments, four_axes, intercept, read_sdpa
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.replacement.planning.capture import AttentionSite, layers_of
from headwise.replacement.planning.drift import Answer, Replacement
from headwise.replacement.standard_kinds import SOFTMAX


def sensitivities(
    model: nn.Module,
    batch: Any,
    sites: Mapping[str, AttentionSite],
    candidates: Mapping[str, Sequence[Replacement]],
    answer: Answer,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """{site: x (key-value heads, candidates, samples)}; a sample is a position, or one of the random directions.

    Query heads that share a key-value head are replaced together.
    """
    samples: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    calls: dict[str, tuple[SdpaArguments, Tensor]] = {}  # of one layer at a time, if layers are recomputed
    layers = layers_of(model, list(sites)).values() if answer.probes == 1 else ()
    backward = False
    exact = {name: MixedHeads([SOFTMAX] * site.heads, site.width, site.length) for name, site in sites.items()}

    def watch(name: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        if name not in sites:
            return original(*call, **options)
        arguments = read_sdpa(*call, **options)
        q, k, v, mask, scale = arguments
        # exact attention by the kernels that planned heads have: its gradient takes half as long as torch's
        out = exact[name](q, k, v, key_mask=mask.key_mask, causal=mask.causal, scale=scale)
        out = out.reshape(*(call[0] if call else options["query"]).shape[:-1], out.shape[-1])
        if not out.requires_grad:
            out.requires_grad_()
        if backward or not layers:
            arguments = arguments._replace(q=arguments.q.detach(), k=arguments.k.detach(), v=arguments.v.detach())
            calls[name] = arguments, four_axes(out.detach())
        if backward:
            return out
        gradients: list[Tensor] = []

        def collect(gradient: Tensor) -> None:
            gradients.append(four_axes(gradient.detach()))
            if len(gradients) == answer.probes:
                arguments, before = calls.pop(name)
                groups = sites[name].key_value_heads
                samples[name] = _products(candidates[name], arguments, before, gradients, groups, answer.by_position)

        out.register_hook(collect)
        outputs.append(out)
        return out

    # an interception is off inside of torch.autograd.grad: recomputed layers need one of their own
    with torch.enable_grad(), _recomputed(layers, lambda: intercept(model, answer=watch)):
        with intercept(model, answer=watch):
            states = answer.run(model, batch)
        backward = True
        for index, gradient in enumerate(answer.gradients(model, states, generator)):
            more = index + 1 < answer.probes
            torch.autograd.grad([states], outputs, [gradient], retain_graph=more, allow_unused=True)
    one = next(iter(samples.values()))
    # a site that the answer does not depend on moves nothing
    return {name: samples.get(name, one.new_zeros(x.key_value_heads, *one.shape[1:])) for name, x in sites.items()}


@torch.no_grad()
def _products(
    candidates: Sequence[Replacement],
    call: SdpaArguments,
    exact: Tensor,
    gradients: Sequence[Tensor],
    groups: int,
    by_position: bool,
) -> Tensor:
    """x (groups, candidates, positions or probes)"""
    q, k, v, mask, scale = call
    rows = []
    for candidate in candidates:
        moved = candidate(q, k, v, key_mask=mask.key_mask, causal=mask.causal, scale=scale) - exact
        # (groups, n) for each probe
        x = [(moved * g).sum(-1).unflatten(1, (groups, -1)).sum((0, 2)).float() for g in gradients]
        rows.append(x[0] if by_position else torch.stack([each.sum(-1) for each in x], dim=-1))
    return torch.stack(rows, dim=1).nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6)


class _Recomputed:
    """A forward whose activations are computed again in the backward pass, while some thread uses it."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward, self.on_instance, self.users = layer.forward, layer.__dict__.get("forward"), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contexts = contextlib.nullcontext(), getattr(_THREAD, "context", contextlib.nullcontext)()
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)


_THREAD = threading.local()
"""context: makes the context in which this thread recomputes a layer, while it asks for sensitivities"""

_LAYERS = threading.Lock()
"""Held while a layer gets or loses a _Recomputed, so that the last thread restores what the first one found."""


@contextlib.contextmanager
def _recomputed(
    layers: Iterable[nn.Module], context: Callable[[], contextlib.AbstractContextManager]
) -> Iterator[None]:
    """`layers` keep no activations; a forward that was set on an instance is restored, not deleted.

    They are recomputed in `context()`.
    """
    layers, _THREAD.context = list(dict.fromkeys(layers)), context
    with _LAYERS:
        for layer in layers:
            forward = layer.__dict__.get("forward")
            if not isinstance(forward, _Recomputed):
                forward = layer.__dict__["forward"] = _Recomputed(layer)
            forward.users += 1
    try:
        yield
    finally:
        del _THREAD.context
        with _LAYERS:
            for layer in layers:
                forward = layer.__dict__["forward"]
                forward.users -= 1
                if not forward.users and forward.on_instance is None:
                    del layer.__dict__["forward"]
                elif not forward.users:
                    layer.__dict__["forward"] = forward.on_instance
