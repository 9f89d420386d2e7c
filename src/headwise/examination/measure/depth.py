"""What depth does to the tokens: relative residuals with skips and MLPs switched off, and contributions by path length.

    all                  the model as it is
    no attention skip    X <- attention(X) instead of X + attention(X)
    no MLP               the MLP and its skip left out
    pure attention       both

These are the collapse curves of Dong, Cordonnier & Loukas 2021 ("Attention is not all you need"), on a real model and
in float64: float32 residuals do not fall below 2e-7.  Of a model with several lists of blocks, such as an encoder and a
decoder, they are those of the first.  A block is recognised by its parts: in BERT, GPT-2, Llama, ViT, Whisper, BART,
wav2vec 2.0 and torch's own encoder layer.  To support another family, extend `_family` and `_switch_off`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.examination.measure.observe import BlockTokens, block_of
from headwise.examination.measure.path_lengths import by_length
from headwise.examination.record import Examination
from headwise.models.inputs import in_words
from headwise.models.intercept import intercept
from headwise.models.run import Batch, block_list, blocks_of, first_sequence, hidden_states, in_double, run_model
from headwise.progress import Progress, reported
from headwise.theory.collapse import relative_residual

CURVES = ("all", "no attention skip", "no MLP", "pure attention")


def with_depth(
    examination: Examination, model: nn.Module, batch: Batch, *, progress: Progress | bool | None = None
) -> Examination:
    """The examination with `ablations` and `paths` measured on the first sequence of `batch`, in float64.

    A part that fails is left out with the reason: the heads have been measured, and their report must not be lost.
    """
    with reported(progress) as report:
        report("switching skips and MLPs off", 0, None)
        ablations, paths = (_unless_it_fails(part, model, batch) for part in (collapse_curves, by_length))
    headline, words = list(examination.headline), examination.inputs.get("words", {})
    if examination.inputs["longest"] < 2:
        ablations = {"supported": False, "why": in_words("a single token is equal to itself", words)}
    if ablations["supported"]:
        residuals = ablations["curves"]["no attention skip"]
        where = f" of {ablations['blocks']}" if ablations["other_blocks"] else ""
        sentence = (
            f"On one text: without its attention skips the relative residual would fall from {residuals[0]:.2g} to "
            f"{residuals[-1]:.0e} in {len(residuals) - 1} layers{where}: all tokens would become equal."
            if residuals[-1] < 1e-2
            else f"On one text: even without its attention skips{where} the relative residual stays at "
            f"{residuals[-1]:.2g}."
        )
        headline.append(in_words(sentence, words))
    return replace(examination, ablations=ablations, paths=paths, headline=headline)


def _unless_it_fails(
    part: Callable[[nn.Module, Batch], dict[str, Any]], model: nn.Module, batch: Batch
) -> dict[str, Any]:
    try:
        return part(model, batch)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or "no reason given"
        return {"supported": False, "why": f"{type(model).__name__} failed with {type(error).__name__}: {reason}"}


def collapse_curves(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Relative residual after every block for each of the four variants, on the first sequence of the batch."""
    blocks, others = _first_list(blocks_of(model))
    unknown = next((type(block).__name__ for block in blocks.values() if _family(block) is None), None)
    if not blocks or unknown is not None:
        which = unknown or f"{type(model).__name__}, which has no list of blocks"
        return {"supported": False, "why": f"skips and MLPs cannot be told apart in {which}"}
    double, text = in_double(model), first_sequence(model, batch, torch.float64)
    curves = {name: _curve(double, text, name) for name in CURVES}
    if not any(curves["all"]):
        return {"supported": False, "why": "the tokens of the first text are equal, or it has only one"}
    return {
        "supported": True,
        "curves": curves,
        "blocks": next(map(block_list, blocks)),
        "other_blocks": others,
    }


def _first_list(blocks: dict[str, nn.Module]) -> tuple[dict[str, nn.Module], list[str]]:
    """The blocks of the first list of them, and the names of the other lists."""
    first, *others = dict.fromkeys(map(block_list, blocks)) or [""]
    return {name: block for name, block in blocks.items() if block_list(name) == first}, others


def _curve(model: nn.Module, batch: Batch, name: str) -> list[float]:
    (blocks, _), states, tokens = _first_list(blocks_of(model)), dict[str, float](), BlockTokens()

    def residual(block: str, x: Tensor) -> float | None:
        found = tokens.of(block, x)
        return None if found is None else relative_residual(found[0]).item()

    skip, mlp = name in ("all", "no MLP"), name in ("all", "no attention skip")
    with torch.no_grad(), ExitStack() as undo:
        for block in blocks.values():
            for handle in _switch_off(block, skip=not skip, mlp=not mlp):
                undo.enter_context(handle)
        undo.enter_context(hidden_states(blocks, residual, states))
        undo.enter_context(intercept(model, lambda call: tokens.add(block_of(call, blocks), call)))
        run_model(model, batch)
    return list(states.values())


def _family(block: nn.Module) -> str | None:
    has = lambda *names: all(isinstance(getattr(block, name, None), nn.Module) for name in names)  # noqa: E731
    if has("attention", "intermediate", "output"):
        return "bert" if hasattr(block.attention, "output") and not has("layernorm_before") else "vit"
    if any(has("self_attn", *linear) for linear in (("linear1", "linear2"), ("fc1", "fc2"))):
        return "two linear layers"
    if any(has(attention, "mlp") for attention in ("attn", "self_attn", "attention")):
        return "mlp"
    if has("attention", "feed_forward"):
        return "feed_forward"
    return None


def _switch_off(block: Any, *, skip: bool, mlp: bool) -> list[Any]:
    """Hooks that leave out the skip of the attention, or the MLP, of one block."""
    family, handles = _family(block), []
    if skip and family == "bert":
        handles.append(block.attention.output.register_forward_pre_hook(_zero_second_input, with_kwargs=True))
    elif skip:
        attention = getattr(block, "self_attn", None) or getattr(block, "attn", None) or block.attention
        handles += _subtract_input(block, attention)
    if mlp and family in ("bert", "vit"):
        handles.append(block.output.register_forward_hook(_return_second_input, with_kwargs=True))
    elif mlp:
        last = next(getattr(block, name) for name in ("linear2", "fc2", "mlp", "feed_forward") if hasattr(block, name))
        handles.append(last.register_forward_hook(lambda module, args, output: torch.zeros_like(output)))
    return handles


def _subtract_input(block: nn.Module, attention: nn.Module) -> list[Any]:
    """The block adds its input to the attention's output; subtract it there, so that the sum is attention alone."""
    block_input: list[Tensor] = []

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        block_input[:] = [args[0] if args else kwargs["hidden_states"]]

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] - block_input[0], *output[1:])
        return output - block_input[0]

    return [block.register_forward_pre_hook(before, with_kwargs=True), attention.register_forward_hook(after)]


def _zero_second_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if len(args) > 1:
        return (args[0], torch.zeros_like(args[1]), *args[2:]), kwargs
    return args, {**kwargs, "input_tensor": torch.zeros_like(kwargs["input_tensor"])}


def _return_second_input(module: nn.Module, args: tuple, kwargs: Mapping[str, Tensor], output: Tensor) -> Tensor:
    return args[1] if len(args) > 1 else kwargs["input_tensor"]
