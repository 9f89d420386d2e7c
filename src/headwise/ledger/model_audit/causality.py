"""No output depends on a later token: by exchanging later tokens, and by the gradient with respect to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.ledger.model_audit.audited_model import AuditedModel, NotTriedError, gradient
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.ledger.model_audit.sampled_inputs import vocabulary
from headwise.models.intercept import AttentionCall, intercept
from headwise.models.run import OwnHook, run_model

PERTURBATION, GRADIENT, REACH = "causality, by perturbation", "causality, by gradient", "reach of the last output"


def check_perturbation(audited: AuditedModel) -> Promise:
    """Outputs before position t stay what they are when the token at t is exchanged."""
    x, n = audited.positions(), audited.length
    if n < 2:
        raise NotTriedError("one position has no later one")
    distance, where, later = 0.0, "", 0.0
    for t in sorted({1, n // 3, n // 2, n - 2, n - 1} - {0, -1}):
        out = audited.run(audited.with_positions(exchanged(audited, x, t)))
        earlier, (b, i) = audited.worst(out[:, :t], audited.reference[:, :t])
        later = max(later, audited.distance(out[:, t:], audited.reference[:, t:]))
        if earlier > distance:
            distance, where = earlier, f"sequence {b}, position {i} sees position {t}"
    if later <= (audited.threshold if distance > 0 else 0):
        raise NotTriedError(f"exchanged tokens change the output by {later:.2g} only, so nothing can be seen by it")
    return _verdict(audited, PERTURBATION, distance, where, "An exchanged token changes no earlier output.")


def attends_causally(model: nn.Module, batch: Any) -> bool | None:
    """True if every attention call of more than one query hides later keys; None if one does not, or none is seen."""
    causal: list[bool] = []

    def see(call: AttentionCall) -> None:
        if call.q.shape[-2] > 1:
            causal.append(call.causal)

    with torch.no_grad(), intercept(model, see):
        run_model(model, batch)
    return True if causal and all(causal) else None


def exchanged(audited: AuditedModel, x: Tensor, t: int) -> Tensor:
    """The positions of the input with another token, or another vector, at position t of every sequence."""
    changed, generator = x.clone(), torch.Generator().manual_seed(audited.seed + t)
    if x.is_floating_point():
        noise = torch.randn(x[:, t].shape, generator=generator).to(x.device, x.dtype)
        changed[:, t] = x[:, t] + noise * x.std()
        return changed
    tokens = _exchangeable(audited, x)
    for b in range(len(x)):
        others = tokens[tokens != x[b, t].item()]
        if len(others):
            changed[b, t] = others[torch.randint(len(others), (), generator=generator)]
    return changed


def _exchangeable(audited: AuditedModel, x: Tensor) -> Tensor:
    """The vocabulary of a model that declares one, else the tokens of the given batch."""
    if audited.is_text:
        with contextlib.suppress(InputError):
            return vocabulary(audited.model)
    return x.unique().cpu()


def check_gradient(audited: AuditedModel) -> Iterator[Promise]:
    """The gradient of an output with respect to later tokens is zero; how far back that of the last one reaches."""
    x, n = audited.positions(), audited.length
    queries = sorted({0, n // 3, n // 2, n - 2, n - 1} & set(range(n)))
    gradients = _gradients(audited, x, queries)  # (queries, b, n)
    largest = gradients.amax().item()
    if not largest > 0:
        raise NotTriedError("no gradient reaches the token embeddings")
    distance, where = 0.0, ""
    for row, i in zip(gradients, queries, strict=True):
        later = row[:, i + 1 :]
        if later.numel() and later.amax().item() / largest > distance:
            b, j = divmod(int(later.argmax()), later.shape[1])
            distance, where = later.amax().item() / largest, f"sequence {b}, position {i} sees position {i + 1 + j}"
    yield _verdict(audited, GRADIENT, distance, where, "No output has a gradient with respect to a later token.")
    seen = (gradients[-1] > 0).any(0).nonzero().flatten()
    reach = n - int(seen.min()) if len(seen) else 0
    sentence = f"The last of {n} outputs depends on the {reach} last tokens."
    yield Promise(REACH, Standing.MEASURED, sentence, float(reach))


def _verdict(audited: AuditedModel, name: str, distance: float, where: str, kept: str) -> Promise:
    why = "as in an encoder" if audited.causal is False else "which is right unless the model is meant to be causal"
    violated = "An output depends on a later token." if audited.causal else f"Outputs depend on later tokens, {why}."
    return audited.verdict(name, distance, where, kept=kept, violated=violated, is_promised=bool(audited.causal))


def _gradients(audited: AuditedModel, x: Tensor, queries: list[int]) -> Tensor:
    """(queries, b, n): the largest |d (output at a query . random vector) / d token|."""
    leaves: list[Tensor] = []
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        if x.is_floating_point():
            leaves.append(x.detach().clone().requires_grad_())
            batch = audited.with_positions(leaves[0] * 1)
        else:
            batch = audited.batch
            stack.enter_context(_watched_embeddings(audited.model, x, leaves))
        out = audited.output_of(audited.call(batch))
        if not out.requires_grad or not leaves:
            raise NotTriedError("no gradient reaches the token embeddings")
        weights = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(audited.seed))
        weights = weights.to(out.device, out.dtype)
        rows = []
        for i in queries:
            found = gradient((out[:, i] @ weights).sum(), leaves)
            sizes = [g.detach().abs().flatten(2).amax(-1) for g in found if g is not None]
            rows.append(torch.stack(sizes).amax(0) if sizes else out.new_zeros(x.shape[:2]))
    return torch.stack(rows)


@contextlib.contextmanager
def _watched_embeddings(model: nn.Module, ids: Tensor, leaves: list[Tensor]) -> Iterator[None]:
    """The embeddings of `ids`, wherever the model looks them up, become leaves of the graph."""

    def cut(module: nn.Module, args: tuple, out: Any) -> Any:
        given = next((x for x in args if isinstance(x, Tensor)), None)
        is_ids = given is not None and given.shape == ids.shape and torch.equal(given, ids)
        if not is_ids or not isinstance(out, Tensor) or out.shape[:-1] != ids.shape:
            return None
        leaves.append(out.detach().requires_grad_())
        return leaves[-1] * 1  # a leaf must not be changed in place

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.enter_context(module.register_forward_hook(OwnHook(cut)))
        yield
