"""How far the output of one layer depends on its input, by gradient, against what the config declares."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from headwise.ledger.model_audit.audited_model import AuditedModel, DoesNotApplyError, NotTriedError, gradient
from headwise.ledger.model_audit.declared import declared_reaches
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.models.run import OwnHook, blocks_of

WINDOWS = "windows as the config says"


def check_windows(audited: AuditedModel) -> Promise:
    """The output of each layer depends on exactly the positions that the config declares."""
    declared = declared_reaches(audited.config) if audited.config is not None and not audited.has_decoder else []
    if not declared:
        raise DoesNotApplyError("its config declares no window")
    n, width = audited.length, max(reach.width for reach in declared)
    if n <= width:
        raise NotTriedError(
            f"its window of {width} is not shorter than the {n} tokens; --length {width + 16} (length=) would show it"
        )
    queries = sorted({n - 1, n - 2, width, min(n - 1, width + 2)})
    seen = _layer_gradients(audited, blocks_of(audited.model), queries)
    if len(seen) != len(declared):
        raise NotTriedError(f"the config has {len(declared)} layers, and {len(seen)} blocks gave a gradient")
    looks_back = not any(sizes[i + 1 :].any() for rows in seen.values() for i, sizes in zip(queries, rows, strict=True))
    causal, checked = bool(audited.causal) or looks_back, 0
    worst, where, sentence = 0.0, "", ""
    for name, reach in zip(seen, declared, strict=True):
        if reach.kind == "unknown":
            continue
        checked += 1
        for i, sizes in zip(queries, seen[name], strict=True):
            inside = torch.zeros(n, dtype=torch.bool)
            inside[list(reach.keys(i, n, causal))] = True
            outside = (sizes * ~inside).amax().item() / sizes.amax().item()
            missing = inside & (sizes == 0)
            if outside > max(worst, audited.threshold):
                j = int((sizes * ~inside).argmax())
                worst, where = outside, f"{name}, position {i} sees position {j}"
                sentence = f"A layer sees further than its window ({reach.kind} {reach.width or 'attention'})."
            elif bool(missing.any()) and not sentence:
                j = int(missing.nonzero()[0])
                worst, where = 1.0, f"{name}, position {i} does not see position {j}"
                sentence = f"A layer sees less than the config declares ({reach.kind} {reach.width or 'attention'})."
    if sentence:
        return Promise(WINDOWS, Standing.VIOLATED, sentence, worst, audited.floor, where)
    widths = sorted({reach.width for reach in declared if reach.width})
    kept = f"{checked} layers see exactly what the config declares (window {', '.join(map(str, widths))})."
    return Promise(WINDOWS, Standing.KEPT, kept, worst, audited.floor)


def _layer_gradients(
    audited: AuditedModel, blocks: dict[str, nn.Module], queries: list[int]
) -> dict[str, list[Tensor]]:
    """name -> for each query the largest |d output of the block / d its input| by position."""
    found: dict[str, list[Tensor]] = {}
    leaves: dict[str, Tensor] = {}
    n = audited.length

    def is_state(x: Any) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[1] == n

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            if args and is_state(args[0]):
                leaves[name] = args[0].detach().requires_grad_()
                return (leaves[name] * 1, *args[1:]), kwargs
            if is_state(kwargs.get("hidden_states")):
                leaves[name] = kwargs["hidden_states"].detach().requires_grad_()
                return args, {**kwargs, "hidden_states": leaves[name] * 1}
            return None

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: tuple, out: Any) -> None:
            state = out[0] if isinstance(out, (tuple, list)) else out
            if name not in leaves or not is_state(state) or not state.requires_grad:
                return
            weights = torch.randn(state.shape[-1], generator=torch.Generator().manual_seed(audited.seed)).to(state)
            gradients = []
            for i in queries:
                (found_here,) = gradient((state[:, i] @ weights).sum(), [leaves[name]])
                if found_here is None:
                    return
                gradients.append(found_here.abs().amax((0, 2)).cpu())
            found[name] = gradients

        return hook

    with torch.enable_grad(), contextlib.ExitStack() as hooks:
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_pre_hook(OwnHook(before(name)), with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(OwnHook(after(name))))
        audited.call(audited.batch)
    return found
