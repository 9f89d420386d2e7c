"""Does depth collapse the tokens?  The relative residual layer by layer with skips and MLPs switched off.

    all                  the model as it is
    no attention skip    X <- attention(X) instead of X + attention(X)
    no MLP               the MLP and its skip left out
    pure attention       both

S0's experiment on a real model, in float64: float32 residuals bottom out near 2e-7.  A block is understood by its parts
(BERT-, GPT-2-, Llama- and ViT-like ones, and torch's own encoder layer); any other is said to be unsupported.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.run import blocks_of, hidden_states, in_double, run_model
from headwise.theory.collapse import relative_residual

CURVES = ("all", "no attention skip", "no MLP", "pure attention")


def collapse_curves(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Relative residual after every block for each of the four variants, on the first sequence of the batch."""
    blocks = blocks_of(model)
    strange = next((type(block).__name__ for block in blocks.values() if _family(block) is None), None)
    if not blocks or strange is not None:
        found = strange or f"{type(model).__name__}, which has no list of blocks"
        return {"supported": False, "why": f"skips and MLPs cannot be told apart in {found}"}
    double = in_double(model)
    one = {key: x[:1] if isinstance(x, Tensor) and x.dim() else x for key, x in batch.items()}
    one = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in one.items()}
    curves = {name: _curve(double, one, name) for name in CURVES}
    return {"supported": True, "curves": curves}


def _curve(model: nn.Module, batch: Mapping[str, Tensor], name: str) -> list[float]:
    blocks, states = blocks_of(model), dict[str, float]()
    with torch.no_grad(), ExitStack() as undo:
        for block in blocks.values():
            for handle in _switch(block, skip=name in ("all", "no MLP"), mlp=name in ("all", "no attention skip")):
                undo.callback(handle.remove)
        undo.enter_context(hidden_states(blocks, lambda x: relative_residual(x[0]).item(), states))
        run_model(model, batch)
    return list(states.values())


def _family(block: nn.Module) -> str | None:
    has = lambda *names: all(isinstance(getattr(block, name, None), nn.Module) for name in names)  # noqa: E731
    if has("attention", "intermediate", "output"):
        return "bert" if hasattr(block.attention, "output") and not has("layernorm_before") else "vit"
    if has("self_attn", "linear1", "linear2"):
        return "torch"
    if any(has(attention, "mlp") for attention in ("attn", "self_attn", "attention")):
        return "pre-norm"
    return None


def _switch(block: Any, *, skip: bool, mlp: bool) -> list[Any]:
    """Hooks that leave out the attention's skip or the MLP of one block."""
    family, handles = _family(block), []
    if not skip and family == "bert":
        handles.append(block.attention.output.register_forward_pre_hook(_second_input_zero, with_kwargs=True))
    elif not skip:
        attention = getattr(block, "self_attn", None) or getattr(block, "attn", None) or block.attention
        handles += _without_input(block, attention)
    if not mlp and family in ("bert", "vit"):
        handles.append(block.output.register_forward_hook(_second_input, with_kwargs=True))
    elif not mlp:
        last = block.linear2 if family == "torch" else block.mlp
        handles.append(last.register_forward_hook(lambda module, args, output: torch.zeros_like(output)))
    return handles


def _without_input(block: nn.Module, attention: nn.Module) -> list[Any]:
    """The block adds its input to the attention's output: take it away there, so that the sum is attention alone."""
    kept: dict[str, Tensor] = {}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        kept["x"] = args[0] if args else kwargs["hidden_states"]

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] - kept["x"], *output[1:])
        return output - kept["x"]

    return [block.register_forward_pre_hook(before, with_kwargs=True), attention.register_forward_hook(after)]


def _second_input_zero(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if len(args) > 1:
        return (args[0], torch.zeros_like(args[1]), *args[2:]), kwargs
    return args, {**kwargs, "input_tensor": torch.zeros_like(kwargs["input_tensor"])}


def _second_input(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
    return args[1] if len(args) > 1 else kwargs["input_tensor"]
