"""The answer of a model, how far it moves when heads are replaced, and the gradients that predict it.

    drift = 1 - cos(mean of the final states, the same before)            encoders
    drift = the greater of KL(predictions before || after) and
            loss after - loss before, both means over tokens, in nats     language models

The divergence is the expected increase of the loss if the model is right, and has less noise; the loss is of this text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.intercept import intercept, read_sdpa
from headwise.models.run import OwnHook, run_model, without_cache

Replacement = Callable[..., Tensor]
"""(q, k, v, key_mask=, causal=, scale=) -> output of a site, such as MixedHeads."""

PROBES = 96
"""Random directions in all, at least 4 and at most 12 for each text: many texts tell more than many directions."""

CHUNK = 256
"""Positions whose logits are held at once: those of 4096 positions and a vocabulary of 50,000 are 800 MB."""


class Answer(Protocol):
    """What is compared.

    measure      name in plans
    probes       backward passes per text
    by_position  a text of n tokens has an answer at every position, so that its beginnings are texts too
    """

    measure: str
    probes: int
    by_position: bool

    def run(self, model: nn.Module, batch: Any) -> Tensor:
        """Final states (b, n, width), or pooled ones (b, width)"""
        ...

    def gradients(self, model: nn.Module, states: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """The gradient of the answer with respect to the states, for each probe"""
        ...

    def drift(self, model: nn.Module, batch: Any, before: Tensor, after: Tensor) -> Tensor:
        """(measures, b, positions or 1): the drift of a text is the greatest of the means of its measures"""
        ...


@final
class Predictions:
    """Probabilities of the next token, from the final states."""

    measure, probes, by_position = "loss", 1, True

    def run(self, model: nn.Module, batch: Any) -> Tensor:
        head = _output_embedding(model)
        if head is None:
            return _tensor(run_model(model, without_cache(model, batch)), ("last_hidden_state",))
        seen: list[Tensor] = []
        with head.register_forward_pre_hook(OwnHook(lambda module, args: seen.append(args[0]))):
            run_model(model, without_cache(model, batch))
        return seen[-1]

    @torch.no_grad()
    def gradients(self, model: nn.Module, states: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """d loss / d logits = p - e_y, for labels y drawn from p"""
        gradient, weight = torch.empty_like(states), _weight(model)
        for part, into in zip(states.split(CHUNK, 1), gradient.split(CHUNK, 1), strict=True):
            p = self._log_p(model, part).exp()
            drawn = torch.multinomial(p.flatten(0, 1).cpu(), 1, generator=generator).view(*p.shape[:2], 1).to(p.device)
            p.scatter_add_(-1, drawn, p.new_full(drawn.shape, -1.0))
            into.copy_(p.to(weight.dtype) @ weight)
        yield gradient / len(states) ** 0.5  # texts of a batch are independent: their squares add on average

    @torch.no_grad()
    def drift(self, model: nn.Module, batch: Any, before: Tensor, after: Tensor) -> Tensor:
        rows, labels = [], batch["input_ids"][:, 1:]
        for *parts, label in zip(
            *(x[:, :-1].split(CHUNK, 1) for x in (before, after)), labels.split(CHUNK, 1), strict=True
        ):
            p, q = (self._log_p(model, part) for part in parts)
            moved = p - q
            losses = moved.gather(-1, label.unsqueeze(-1)).squeeze(-1)
            rows.append(torch.stack([(p.exp() * moved).sum(-1), losses]).double())
        return torch.cat(rows, -1).nan_to_num(nan=1e9, posinf=1e9, neginf=1e9)

    @staticmethod
    def _log_p(model: nn.Module, states: Tensor) -> Tensor:
        head = _output_embedding(model)
        logits = states @ _weight(model).mT if head is None else head(states)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


@final
class PooledStates:
    """The mean of the final states over real tokens."""

    measure, by_position = "cosine", False

    def __init__(self, probes: int = 12) -> None:
        self.probes = probes

    def run(self, model: nn.Module, batch: Any) -> Tensor:
        output = run_model(model, without_cache(model, batch))
        states = _tensor(output, ("last_hidden_state", "hidden_states", "logits")).float()
        if states.dim() < 3:
            return states
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is None or mask.shape != states.shape[:2]:
            return states.flatten(1, -2).mean(1)
        weights = mask.to(states.dtype).unsqueeze(-1)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)

    def gradients(self, model: nn.Module, states: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """Random directions across the states, divided by the lengths of the states"""
        length = states.detach().norm(dim=-1, keepdim=True)
        length = length.masked_fill(length == 0, torch.inf)  # a text that is all masked does not move
        unit = states.detach() / length
        for _ in range(self.probes):
            z = torch.randn(states.shape, generator=generator).to(states)
            yield (z - (z * unit).sum(-1, keepdim=True) * unit) / length / len(states) ** 0.5

    def drift(self, model: nn.Module, batch: Any, before: Tensor, after: Tensor) -> Tensor:
        before, after = before.double(), after.double()
        nothing = (before == 0).all(-1) & (after == 0).all(-1)
        cosine = F.cosine_similarity(before, after, dim=-1)
        return (1 - cosine).clamp(min=0).masked_fill(nothing, 0).nan_to_num(nan=1e9).view(1, -1, 1)


def answer_for(model: nn.Module, batch: Any, *, causal: bool, texts: int = 1) -> Answer:
    """Predictions of decoders whose output embedding is known, states of all other models; `texts` share the probes."""
    if causal and isinstance(batch, Mapping) and "input_ids" in batch:
        tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
        if _output_embedding(model) is not None or (tied and hasattr(model, "get_input_embeddings")):
            return Predictions()
    return PooledStates(min(12, max(4, -(-PROBES // texts))))


def _output_embedding(model: nn.Module) -> nn.Module | None:
    head = getattr(model, "get_output_embeddings", lambda: None)() or getattr(model, "lm_head", None)
    return head if isinstance(getattr(head, "weight", None), Tensor) else None


def _weight(model: nn.Module) -> Tensor:
    """(vocabulary, width) of the output embedding, or of the input embedding that is tied to it."""
    return (_output_embedding(model) or model.get_input_embeddings()).weight  # type: ignore[operator,return-value]


def run_with(model: nn.Module, batch: Any, answer: Answer, replacements: Mapping[str, Replacement]) -> Tensor:
    """The states of `answer` with some sites replaced."""

    def attend(site: str, original: Callable[..., Tensor], call: tuple, options: dict) -> Tensor:
        replacement = replacements.get(site)
        if replacement is None:
            return original(*call, **options)
        q, k, v, mask, scale = read_sdpa(*call, **options)
        out = replacement(q, k, v, key_mask=mask.key_mask, causal=mask.causal, scale=scale)
        return out.reshape(*(call[0] if call else options["query"]).shape[:-1], out.shape[-1])

    with torch.no_grad(), intercept(model, answer=attend):
        return answer.run(model, batch)


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
