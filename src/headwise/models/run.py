"""Run a model on a batch, and observe the hidden states between its blocks."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError, InputError
from headwise.random_state import kept_random_state

T = TypeVar("T")

Batch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""What a model takes: keyword arguments, positional arguments, or one tensor."""


def run_model(model: nn.Module, batch: Batch) -> Any:
    """model(**batch), model(*batch) or model(batch); InputError if the model does not take it."""
    tensors = check_batch(batch)
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(batch) if isinstance(batch, Tensor) else model(*batch)
    except (HeadwiseError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors)
        first = (str(error).splitlines() or [""])[0][:200]
        raise InputError(
            f"{type(model).__name__} does not run on the batch {shapes}: {type(error).__name__}: {first}"
        ) from error


def check_batch(batch: Batch) -> list[tuple[str, Tensor]]:
    """The tensors of a batch by name; InputError unless there are some, with values and without an empty axis."""
    if isinstance(batch, Tensor):
        tensors = [("input", batch)]
    elif isinstance(batch, Mapping):
        tensors = [(str(name), x) for name, x in batch.items() if isinstance(x, Tensor)]
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        tensors = [(f"input {i}", x) for i, x in enumerate(batch) if isinstance(x, Tensor)]
    else:
        raise InputError(
            f"a batch is a tensor, a dict of tensors or a list of tensors, but this one is a {type(batch).__name__}; "
            "give a list of batches, also if there is only one"
        )
    if not tensors:
        raise InputError(f"a batch needs a tensor, but this {type(batch).__name__} of {len(batch)} entries has none")
    for name, x in tensors:
        if x.is_meta:
            raise InputError(f"{name} is on the meta device and has no values; give a batch with values")
        if x.numel() == 0:
            raise InputError(f"{name} has shape {tuple(x.shape)}: an empty batch has no attention")
    return tensors


def map_batch(change: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with `change` applied to each of its tensors."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: change(x) if isinstance(x, Tensor) else x for key, x in batch.items()}
    return [change(x) if isinstance(x, Tensor) else x for x in batch]


def placed(batch: Batch, device: torch.device | str | None, dtype: torch.dtype | None) -> Batch:
    """The batch on `device`, floating-point tensors in `dtype`; None leaves either as it is."""
    return map_batch(lambda x: x.to(device, dtype if x.is_floating_point() else None), batch)


def first_sequence(batch: Batch, dtype: torch.dtype | None = None) -> Batch:
    """The first sequence as a batch of one; floating-point tensors in `dtype` if given."""

    def cut(x: Tensor) -> Tensor:
        x = x[:1] if x.dim() else x
        return x if dtype is None or not x.is_floating_point() else x.to(dtype)

    return map_batch(cut, batch)


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the context; afterwards the model and the global random state are as before.

    Several threads may be inside with the same modules: each module gets its mode back when the last of them leaves.
    """
    modules = list(model.modules())
    before = {id(hook) for module in modules for _, hook in _own_hooks(module)}
    evaluated: list[nn.Module] = []
    with kept_random_state():
        try:
            for module in modules:
                _MODES.evaluate(module)
                evaluated.append(module)
            yield
        finally:
            for module in evaluated:
                _MODES.restore(module)
            for module in modules:  # an interrupt may have left a hook
                for remove, hook in list(_own_hooks(module)):
                    if id(hook) not in before:
                        remove()


class _Modes:
    """The modes of modules that are evaluated, to be restored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modes: dict[nn.Module, tuple[bool, int]] = {}  # its mode before, and how often it is being evaluated

    def evaluate(self, module: nn.Module) -> None:
        with self._lock:
            training, count = self._modes.get(module, (module.training, 0))
            self._modes[module] = training, count + 1
            module.training = False

    def restore(self, module: nn.Module) -> None:
        with self._lock:
            training, count = self._modes.pop(module)
            if count > 1:
                self._modes[module] = training, count - 1
            else:
                module.training = training


_MODES = _Modes()


class OwnHook:
    """A hook that acts in the thread that made it only: other threads may run the same model meanwhile."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act, self.thread = act, threading.get_ident()

    def __call__(self, module: nn.Module, *inputs: Any) -> Any:
        return self.act(module, *inputs) if threading.get_ident() == self.thread else None


def _own_hooks(module: nn.Module) -> Iterator[tuple[Callable[[], None], OwnHook]]:
    """(function that removes it, hook) for each hook of this thread."""
    extra = (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, OwnHook) and hook.thread == threading.get_ident():
                handle = RemovableHandle(hooks, extra_dict=list(extra))
                handle.id = key
                yield handle.remove, hook


def in_double(model: nn.Module) -> nn.Module:
    """A float64 copy in eval mode.  Not `model.double()`: transformers refuses that for weights that came from GGUF."""
    return nn.Module.double(copy.deepcopy(model)).eval()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """name -> block: the members of the outermost module lists that hold something called attention."""
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
    """Put `measure` of the first block's input and of every block's output into `states`; the tensors are not kept."""

    def hidden(value: Any) -> Tensor | None:
        if isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value.detach() if isinstance(value, Tensor) and value.dim() == 3 else None

    def hook(name: str) -> Callable:
        block_list = re.sub(r"\.?\d+$", "", name)  # encoder.layer.3 -> encoder.layer

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            before, key = hidden(args) if args else hidden(kwargs.get("hidden_states")), f"{block_list} in"
            if before is not None and key not in states:
                states[key] = measure(before)
            state = hidden(output)
            if state is not None:
                states[name] = measure(state)

        return after

    with contextlib.ExitStack() as hooks:
        for name, module in blocks.items():
            hooks.enter_context(module.register_forward_hook(OwnHook(hook(name)), with_kwargs=True))
        yield
