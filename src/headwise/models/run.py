"""Run a foreign model on a batch, and observe the hidden states between its blocks."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


def run_model(model: nn.Module, batch: Mapping[str, Tensor] | Sequence[Tensor] | Tensor) -> Any:
    """model(**batch), model(*batch) or model(batch)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, Tensor) else model(*batch)


def in_double(model: nn.Module) -> nn.Module:
    """A float64 copy in eval mode.  Not `model.double()`: transformers refuses that for weights that came from GGUF."""
    return nn.Module.double(copy.deepcopy(model)).eval()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Members of the outermost module lists that hold something called attention."""
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 0:
            inside = any(name.startswith(block + ".") for block in names)
            parts = [f"{n} {type(m).__name__}".lower() for n, m in module.named_modules()]
            attends = any("attn" in part or "attention" in part for part in parts)
            if attends and not inside:
                names.update({f"{name}.{i}" if name else i: child for i, child in module.named_children()})
    return names


@contextlib.contextmanager
def hidden_states(blocks: dict[str, nn.Module], measure: Callable[[Tensor], T], states: dict[str, T]) -> Iterator[None]:
    """Put measure(what goes in) and measure(what each block answers) into `states`; the tensors are not kept."""

    def first(output: Any) -> Tensor | None:
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        return output.detach() if isinstance(output, Tensor) and output.dim() == 3 else None

    def hook(name: str) -> Callable:
        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            before, begin = first(args) if args else first(kwargs.get("hidden_states")), f"{_family(name)} in"
            if before is not None and begin not in states:
                states[begin] = measure(before)
            state = first(output)
            if state is not None:
                states[name] = measure(state)

        return after

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _family(block: str) -> str:
    """encoder.layer.3 -> encoder.layer: the list a block belongs to."""
    return re.sub(r"\.?\d+$", "", block)
