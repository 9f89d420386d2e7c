"""Run a model on a batch, and observe the hidden states between its blocks."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwise.errors import HeadwiseError, InputError
from headwise.models.intercept import AttentionCall, intercept
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
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError) as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in tensors)
        first = (str(error).splitlines() or [""])[0][:200]
        raise InputError(
            f"{type(model).__name__} does not run on the batch {shapes}: {type(error).__name__}: {first}"
        ) from error


def without_cache(model: nn.Module, batch: Batch) -> Batch:
    """The batch with use_cache=False for a decoder that would keep keys and values.

    Models with an encoder are left alone: FSMT takes its causal mask from it.
    """
    config = getattr(model, "config", None)
    caching = getattr(config, "use_cache", None) and not getattr(config, "is_encoder_decoder", False)
    if not caching or not isinstance(batch, Mapping) or "use_cache" in batch:
        return batch
    accepted = inspect.signature(model.forward).parameters
    takes = "use_cache" in accepted or any(x.kind is x.VAR_KEYWORD for x in accepted.values())
    with_option: dict[str, Any] = {**batch, "use_cache": False}
    return with_option if takes else batch


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


def first_sequence(model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Batch:
    """The first sequence as a batch of one; floating-point tensors in `dtype` if given.

    Which axis counts sequences is read off the attention calls of the model, which is run for it unless every tensor
    has one sequence on its first axis.
    """
    shapes = [x.shape for _, x in check_batch(batch)]
    layouts = [] if all(shape[:1] in ((), (1,)) for shape in shapes) else _layouts(model, batch)

    def cut(x: Tensor) -> Tensor:
        axis = next((a for a in (layout.axis_of(x.shape) for layout in layouts) if a is not None), None)
        x = x if axis is None else x.narrow(axis, 0, 1)
        return x if dtype is None or not x.is_floating_point() else x.to(dtype)

    return map_batch(cut, batch)


@dataclass(frozen=True)
class SequenceLayout:
    """Which axis of a tensor counts sequences, (b, n, ...) or (n, b, ...), from the sizes of an attention call."""

    sequences: int
    length: int
    batch_first: bool = True  # decides if there are as many sequences as tokens

    @classmethod
    def of(cls, call: AttentionCall) -> SequenceLayout:
        b, _, m, _ = call.q.shape
        return cls(b // call.windows, m * call.windows, getattr(call.module, "batch_first", True) is not False)

    def axis_of(self, shape: Sequence[int]) -> int | None:
        """0 or 1; None if neither axis has as many entries as there are sequences."""
        wide = len(shape) > 2 and tuple(shape[:2]) == (self.length, self.sequences)
        if wide and not (self.batch_first and self.length == self.sequences):
            return 1
        return next((axis for axis in (0, 1) if axis < len(shape) and shape[axis] == self.sequences), None)

    def by_sequence(self, x: Tensor) -> Tensor | None:
        """A hidden state as (b, n, d); None if its sequences are not those of the call."""
        if x.dim() == 2 and self.sequences == 1 and len(x) == self.length:
            return x.unsqueeze(0)
        if x.dim() != 3:
            return None
        axis = self.axis_of(x.shape)
        return None if axis is None else x.transpose(0, axis)


def _layouts(model: nn.Module, batch: Batch) -> list[SequenceLayout]:
    """The different layouts of the attention calls of one forward pass."""
    seen: dict[SequenceLayout, None] = {}
    with torch.no_grad(), intercept(model, lambda call: seen.setdefault(SequenceLayout.of(call))):
        run_model(model, batch)
    return list(seen)


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
    """name -> block: the members of the outermost lists of modules that hold something called attention.

    Of an `nn.Sequential`, which may also be a pipeline, only members that attend; a member that holds a list of blocks
    itself is not a block.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(block + ".") for block in blocks)
        members = [] if inside else _attending(module)
        if members and isinstance(module, nn.Sequential):
            enough = 1 if len(members) == 1 else 2  # two that attend may be two parts of one block
            members = [n for n in members if max(map(len, map(_attending, module.get_submodule(n).modules()))) < enough]
        elif members:
            members = [n for n, _ in module.named_children()]
        blocks.update({f"{name}.{n}" if name else n: module.get_submodule(n) for n in members})
    return blocks


def _attending(module: nn.Module) -> list[str]:
    """The names of members of a list of modules that are called attention or have such a part."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    names = {n: [f"{n}.{part} {type(m).__name__}" for part, m in x.named_modules()] for n, x in module.named_children()}
    return [n for n, parts in names.items() if any(w in x.lower() for x in parts for w in ("attn", "attention"))]


def block_list(block: str) -> str:
    """The list of modules that a block belongs to: encoder.layer.3 -> encoder.layer."""
    return re.sub(r"\.?\d+$", "", block)


@contextlib.contextmanager
def hidden_states(
    blocks: dict[str, nn.Module], measure: Callable[[str, Tensor], T | None], states: dict[str, T]
) -> Iterator[None]:
    """Put `measure` of the first block's input and of every block's output into `states`; the tensors are not kept.

    `measure` is given the name of the block and a tensor with two or three axes.  A block that is used several times
    (shared weights) has the names block, block@2, block@3, ...; a state for which `measure` is None is left out.
    """
    uses: Counter[str] = Counter()

    def put(key: str, block: str, value: Any) -> None:
        if isinstance(value, (tuple, list)) and value:
            value = value[0]
        if isinstance(value, Tensor) and value.dim() in (2, 3):
            measured = measure(block, value.detach())
            if measured is not None:
                states[key] = measured

    def hook(name: str) -> Callable:
        first = f"{block_list(name)} in"

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if first not in states:
                put(first, name, args if args else kwargs.get("hidden_states"))
            uses[name] += 1
            put(name if uses[name] == 1 else f"{name}@{uses[name]}", name, output)

        return after

    with contextlib.ExitStack() as hooks:
        for name, module in blocks.items():
            hooks.enter_context(module.register_forward_hook(OwnHook(hook(name)), with_kwargs=True))
        yield
