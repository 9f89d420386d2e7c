"""X_L = sum_j T[j]: the contribution T[j] of paths through exactly j attention layers to the last hidden state.

    T_(l+1)[j] = A_l T_l[j] + B_l T_l[j-1]        B_l through the heads of layer l, A_l past them

holds for the real network once its nonlinear parts are held at the values they took on this text: the attention
matrices, the scales of the layer norms and the gates of the MLPs (gelu(z) = z g with g held; in a gated MLP the gate).
So the network is run again on L + 1 copies of its input, copy j carrying T[j]: linear maps act on every copy, a bias on
copy 0 only, and attention moves each copy to the next.  This needs no code for any model family; whether the copies add
up to the true output is measured, and where they do not the result is "not supported".

Dong, Cordonnier & Loukas 2021 (path decomposition); the recursion replaces their (H + 1)^L terms by L + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.models.intercept import SdpaArguments, read_sdpa
from headwise.models.run import Batch, blocks_of, first_sequence, in_double, map_batch, run_model
from headwise.theory.collapse import relative_residual

EXACT = 1e-6
"""Largest relative difference between the sum of all paths and the network's own output that counts as equal."""

_ATTENTION = F.scaled_dot_product_attention

_GATED = {F.gelu, F.relu, torch.relu, F.silu, F.elu, F.leaky_relu, F.mish, F.hardswish, F.softplus}
_HELD = {torch.tanh, torch.sigmoid, torch.rsqrt, torch.erf, torch.Tensor.tanh, torch.Tensor.sigmoid, torch.Tensor.rsqrt}


class _Recorder(TorchFunctionMode):
    """Runs the model as it is and records what will be held: one entry for each nonlinear call, in order."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.layer_norm:
            x, axes = args[0], tuple(range(-len(args[1]), 0))
            eps = kwargs.get("eps", args[4] if len(args) > 4 else 1e-5)
            self.held.append((x.var(axes, correction=0, keepdim=True) + eps).rsqrt())
        elif func is F.rms_norm:
            x, eps = args[0], kwargs.get("eps", args[3] if len(args) > 3 else None)
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            self.held.append((x.square().mean(-1, keepdim=True) + eps).rsqrt())
        elif func in _GATED:
            z = args[0]
            self.held.append((out / torch.where(z == 0, torch.ones_like(z), z), out))
        elif func in _HELD:
            self.held.append(out)
        elif func is _ATTENTION:
            self.held.append(read_sdpa(*args, **kwargs))
        return out


class _Replayer(TorchFunctionMode):
    """Runs the model on copies 0 ... L, with nonlinear parts held, from the input of the first block on."""

    def __init__(self, held: list[Any], start: Tensor, *, gate: bool) -> None:
        self.held, self.start, self.copies, self.gate = iter(held), start, len(start), gate
        self.started = False

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Hook of the first block, which receives `start` in place of its input when it is first used."""
        if self.started:
            return args, kwargs
        self.started = True
        return ((self.start, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": self.start})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = func in (F.layer_norm, F.rms_norm, _ATTENTION) or func in _GATED or func in _HELD
        held: Any = next(self.held) if known else None
        if not self.started:
            return func(*args, **kwargs)
        if func is F.linear:
            return self._biased(F.linear(args[0], args[1]), args[2] if len(args) > 2 else kwargs.get("bias"))
        if func is torch.addmm:
            return self._biased(args[1] @ args[2], args[0])
        if func is F.layer_norm:
            x, axes = args[0], tuple(range(-len(args[1]), 0))
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            bias = args[3] if len(args) > 3 else kwargs.get("bias")
            x = (x - x.mean(axes, keepdim=True)) * held
            return self._biased(x if weight is None else x * weight, bias)
        if func is F.rms_norm:
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return args[0] * held * (1 if weight is None else weight)
        if func in _GATED:
            return args[0] * held[0] if self.gate else held[1].expand_as(args[0])
        if func in _HELD:
            return held.expand(self.copies, *held.shape[1:]) if held.dim() and held.shape[0] == 1 else held
        if func is _ATTENTION:
            return self._next_copy(read_sdpa(*args, **kwargs).v, held)
        return func(*args, **kwargs)

    def _biased(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return x
        parts = x.unflatten(0, (self.copies, -1))
        return torch.cat([parts[:1] + bias, parts[1:]]).flatten(0, 1)

    def _next_copy(self, v: Tensor, held: SdpaArguments) -> Tensor:
        """P with the attention matrices that were held, from each copy to the next."""
        q, k = (x.expand(self.copies - 1, *x.shape[1:]) for x in (held.q, held.k))
        mask = held.mask.sdpa_arguments(q.dtype, q.device)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v[:-1], **mask, scale=held.scale, enable_gqa=grouped)
        return torch.cat([torch.zeros_like(out[:1]), out])


def by_length(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Norm, share and relative residual of T[j] for every path length j, on the first sequence of the batch.

    `share` is <T[j], X> / ||X||^2: the shares add up to one; a negative share works against the sum.
    """
    double = in_double(model)
    blocks = blocks_of(double)
    if not blocks:
        return {"supported": False, "why": f"{type(model).__name__} has no list of blocks"}
    text = first_sequence(model, batch, torch.float64)
    try:
        recorder = _Recorder()
        with torch.no_grad(), recorder, _ends(blocks) as ends:
            run_model(double, text)
        if len(ends["in"]) > 1:
            why = f"the hidden states of {type(model).__name__} are not laid out as (batch, sequence, width)"
            return {"supported": False, "why": why}
        true = ends["out"][0]
        copies = 1 + sum(isinstance(call, SdpaArguments) for call in recorder.held)
        start = torch.cat([ends["in"], ends["in"].new_zeros(copies - 1, *ends["in"].shape[1:])])
        many = map_batch(lambda x: x.expand(copies, *x.shape[1:]) if x.dim() and x.shape[0] == 1 else x, text)
        errors = []
        for gate in (True, False):
            replayer = _Replayer(recorder.held, start, gate=gate)
            begin = next(iter(blocks.values())).register_forward_pre_hook(replayer.begin, with_kwargs=True)
            with torch.no_grad(), begin, replayer, _ends(blocks) as ends:
                run_model(double, many)
            errors.append(((ends["out"].sum(0) - true).norm() / true.norm()).item())
            if errors[-1] <= EXACT:
                kept = _kept_tokens(recorder.held, true.shape[-2])
                return _described(ends["out"][:, kept], true[kept], errors[-1])
    except (RuntimeError, StopIteration, KeyError, TypeError, IndexError, ValueError) as problem:
        why = f"{type(model).__name__} cannot be replayed on copies of its input ({str(problem).splitlines()[0][:120]})"
        return {"supported": False, "why": why}
    why = f"the paths of {type(model).__name__} miss its output by {min(errors):.1e}: a part of it is not linear"
    return {"supported": False, "why": why}


def _kept_tokens(held: list[Any], length: int) -> Tensor:
    """(length,) boolean: tokens that are no padding, from the first self-attention over all of them."""
    for call in held:
        if isinstance(call, SdpaArguments) and call.mask.m == call.mask.n == length:
            keys = call.mask.index(0).attended_keys()
            return torch.ones(length, dtype=torch.bool) if keys is None else keys
    return torch.ones(length, dtype=torch.bool)


@contextmanager
def _ends(blocks: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The input of the first block and the output of the last one."""
    ends: dict[str, Tensor] = {}
    modules = list(blocks.values())

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        ends.setdefault("in", args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        ends["out"] = output[0] if isinstance(output, (tuple, list)) else output

    with modules[0].register_forward_pre_hook(before, with_kwargs=True), modules[-1].register_forward_hook(after):
        yield ends


def _described(groups: Tensor, true: Tensor, error: float) -> dict[str, Any]:
    square = true.square().sum()
    return {
        "supported": True,
        "lengths": list(range(len(groups))),
        "norm": (groups.square().sum((-2, -1)) / square).sqrt().tolist(),
        "share": ((groups * true).sum((-2, -1)) / square).tolist(),
        "relative_residual": relative_residual(groups).tolist(),
        "sum_error": error,
        "frozen": ["attention matrices", "layer-norm scales", "MLP gates"],
    }
