"""A model with a batch to try it on: runs it, finds the positions of its output, and estimates its rounding.

    distance(A, B) = max |A - B| / max |A|,    violated: distance > SAFETY * floor

The floor is what rounding does to the output: the model runs again while the output of every layer is multiplied by
1 + 2 eps u, u uniform in [-1, 1].  Errors of that size arise wherever sums are taken in another order, so a promise
that holds in exact arithmetic is missed by about the floor, in any dtype and on any device.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, InputError
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.models.gate import one_line
from headwise.models.run import OwnHook, check_batch, first_sequence, run_model
from headwise.random_state import seeded

SAFETY = 32.0
"""A difference is real if it is this much above the floor, which a few draws estimate."""

BLUNT = 0.1
"""A threshold above this would let violations pass."""

DRAWS = 3
OUTPUTS = ("logits", "last_hidden_state", "image_embeds", "text_embeds", "pooler_output")
"""Which output is compared, if a model returns several; else the first."""

TOKENS = ("decoder_input_ids", "input_ids")


class NotTriedError(HeadwiseError):
    """A promise that cannot be tried on this model; the message is the reason."""


class DoesNotApplyError(NotTriedError):
    """A promise that has no meaning for this model; the message is the reason."""


def gradient(output: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """d output / d inputs; NotTriedError if the model has no backward pass."""
    try:
        return list(torch.autograd.grad(output, inputs, retain_graph=True, allow_unused=True))
    except (RuntimeError, AssertionError) as error:
        raise NotTriedError(f"its backward pass does not run ({one_line(error)})") from error


def untried(name: str, error: HeadwiseError) -> Promise:
    """The verdict on a promise that was not tried."""
    standing = Standing.NOT_APPLICABLE if isinstance(error, DoesNotApplyError) else Standing.NOT_TRIED
    reason = str(error).removesuffix(".")
    return Promise(name, standing, f"{standing.value.capitalize()}: {reason}.")


@final
class AuditedModel:
    """The model in eval mode, and one batch of equally long sequences without padding."""

    def __init__(self, model: nn.Module, batch: Any, *, causal: bool | None, seed: int) -> None:
        self.model, self.seed, self.causal = model, seed, causal
        self.batch, self.is_positional = _as_mapping(batch, inspect.signature(model.forward).parameters)
        self.arguments = _arguments(model)
        self.config = getattr(model, "config", None)
        with torch.no_grad():
            self.raw = self.call(self.batch)
        reference = main_output(self.raw, model)
        self._batch_axes = self._find_batch_axes()
        sizes = {
            x.shape[self._batch_axes[name]] for name, x in self.batch.items() if self._batch_axes[name] is not None
        }
        if len(sizes) != 1:
            raise InputError(f"{self.name}: the tensors of a batch hold {sorted(sizes)} sequences; give one number")
        (self.sequences,) = sizes
        self._output_axis = self._find_output_axis(reference)
        self.reference = self.by_sequence(reference)
        self.scale = self.reference.abs().amax().item() or 1.0
        self.tokens = self._find_tokens(reference)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def is_transformers(self) -> bool:
        """Whether it is a model of transformers, which others with a config are not."""
        return hasattr(self.model, "main_input_name")

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder with a decoder."""
        return "decoder_input_ids" in self.batch

    @property
    def length(self) -> int:
        """Positions of the output."""
        return self.reference.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.reference.dtype

    @property
    def is_text(self) -> bool:
        return self.tokens in TOKENS

    def takes(self, argument: str) -> bool:
        """Whether the model, or the part that it hands further arguments to, has this argument."""
        return argument in self.arguments

    # ---- running it ----

    def call(self, batch: Mapping[str, Any], *, seed: int | None = None, **more: Any) -> Any:
        """What the model returns, without a cache unless `more` wants one; random numbers are the same every time."""
        more = {"use_cache": False, **more} if self.takes("use_cache") else more
        with seeded(self.seed if seed is None else seed):
            try:
                return run_model(self.model, list(batch.values()) if self.is_positional else {**batch, **more})
            except (AttributeError, AssertionError) as error:  # in code of the model
                raise InputError(f"{self.name} does not run: {one_line(error)}") from error

    def run(self, batch: Mapping[str, Any], **more: Any) -> Tensor:
        """(b, n, d): the main output on a batch, without gradients."""
        with torch.no_grad():
            return self.output_of(self.call(batch, **more))

    def output_of(self, raw: Any) -> Tensor:
        return self.by_sequence(main_output(raw, self.model))

    def rows(self, start: int, stop: int) -> dict[str, Any]:
        """The batch with some of its sequences."""
        axes = self._batch_axes
        return {
            name: x if axes[name] is None else x.narrow(axes[name], start, stop - start)
            for name, x in self.batch.items()
        }

    def positions(self) -> Tensor:
        """(b, n) or (b, n, d): the entry of the batch that has the positions of the output."""
        if self.tokens is None:
            raise DoesNotApplyError("its output has no position for each position of an input")
        axis = self._batch_axes[self.tokens] or 0
        return self.batch[self.tokens].movedim(axis, 0)

    def with_positions(self, x: Tensor) -> dict[str, Any]:
        """The batch with `x` for `positions()`."""
        assert self.tokens is not None
        return {**self.batch, self.tokens: x.movedim(0, self._batch_axes[self.tokens] or 0)}

    # ---- comparing ----

    def distance(self, found: Tensor, expected: Tensor) -> float:
        """max |found - expected| / max |output|; NaN counts as infinitely far."""
        return self.worst(found, expected)[0]

    def worst(self, found: Tensor, expected: Tensor) -> tuple[float, tuple[int, int]]:
        """`distance`, and (sequence, position) where it is."""
        if found.shape != expected.shape:
            raise NotTriedError(f"the output has shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        if not found.numel():
            return 0.0, (0, 0)
        gap = (found.double() - expected.double()).abs().amax(-1)
        gap = torch.where(gap.isnan(), torch.inf, gap)
        index = int(gap.argmax())
        return gap.amax().item() / self.scale, (index // gap.shape[1], index % gap.shape[1])

    @cached_property
    def floor(self) -> float:
        """What rounding does to the output, at least eps."""
        eps = torch.finfo(self.dtype).eps
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        floor = eps
        for _ in range(DRAWS):
            with self._rounding(generator, eps):
                distance = self.distance(self.run(self.batch), self.reference)
            floor = max(floor, distance)
        return floor

    @property
    def threshold(self) -> float:
        return SAFETY * self.floor

    def verdict(
        self, name: str, distance: float, where: str, *, kept: str, violated: str, is_promised: bool = True
    ) -> Promise:
        """KEPT or VIOLATED by whether `distance` is above rounding; MEASURED if nothing was promised."""
        if distance > self.threshold:
            standing = Standing.VIOLATED if is_promised else Standing.MEASURED
            return Promise(name, standing, violated, distance, self.floor, where)
        if self.threshold > BLUNT and distance > 0:
            raise NotTriedError(
                f"rounding alone changes the output by {self.floor:.2g} in {str(self.dtype)[6:]}, too much to see a "
                "violation; try float32 (--dtype) or other inputs"
            )
        return Promise(name, Standing.KEPT if is_promised else Standing.MEASURED, kept, distance, self.floor)

    @contextlib.contextmanager
    def _rounding(self, generator: torch.Generator, eps: float) -> Iterator[None]:
        """The output of every innermost module is off by a few eps."""

        def disturb(module: nn.Module, args: tuple, out: Any) -> Any:
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return None
            noise = torch.rand(out.shape, generator=generator).to(out.device, out.dtype)
            return out + out * ((4 * eps) * noise - 2 * eps)

        with contextlib.ExitStack() as hooks:
            for module in self.model.modules():
                if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                    hooks.enter_context(module.register_forward_hook(OwnHook(disturb)))
            yield

    # ---- what its tensors are ----

    def _find_batch_axes(self) -> dict[str, int | None]:
        """name -> the axis that counts sequences."""
        if self.is_transformers:
            return {name: 0 if isinstance(x, Tensor) and x.dim() else None for name, x in self.batch.items()}
        given = list(self.batch.values()) if self.is_positional else self.batch
        cut = first_sequence(self.model, given)
        shapes = [x.shape for x in (cut.values() if isinstance(cut, Mapping) else cut) if isinstance(x, Tensor)]
        whole = [x.shape for x in self.batch.values() if isinstance(x, Tensor)]
        axes = [next((a for a in range(len(w)) if w[a] != s[a]), None) for w, s in zip(whole, shapes, strict=True)]
        known = any(axis is not None for axis in axes)
        names = [name for name, x in self.batch.items() if isinstance(x, Tensor)]
        found = {n: a if known else 0 for n, a in zip(names, axes, strict=True)}
        return {name: found.get(name) for name in self.batch}

    def _find_output_axis(self, reference: Tensor) -> int:
        """Which axis of the output counts sequences."""
        if self.sequences == 1 or reference.dim() < 2:
            return next((axis for axis in self._batch_axes.values() if axis is not None), 0)
        with torch.no_grad():
            one = main_output(self.call(self.rows(0, 1)), self.model)
        differs = [a for a in range(reference.dim()) if reference.shape[a] != one.shape[a]]
        return differs[0] if differs else 0

    def by_sequence(self, out: Tensor) -> Tensor:
        """A main output as (b, n, d)."""
        out = out.movedim(self._output_axis, 0)
        return out.reshape(len(out), 1, -1) if out.dim() < 3 else out.flatten(2)

    def _find_tokens(self, reference: Tensor) -> str | None:
        """The entry of the batch with the positions of the output."""
        shape = reference.movedim(self._output_axis, 0).shape[:2]
        if reference.dim() < 3:
            return None
        names = [name for name in TOKENS if name in self.batch][:1] or list(self.batch)
        for name in names:
            x = self.batch[name]
            if isinstance(x, Tensor) and x.dim() > 1 and x.movedim(self._batch_axes[name] or 0, 0).shape[:2] == shape:
                return name
        return None


def main_output(raw: Any, model: nn.Module) -> Tensor:
    """The tensor that is compared; InputError if the model returns none."""
    if isinstance(raw, Tensor):
        return raw
    named = {name: x for name, x in raw.items() if "loss" not in name} if isinstance(raw, Mapping) else {}
    values = named.values() if named else raw if isinstance(raw, (tuple, list)) else ()
    preferred = (named[name] for name in OUTPUTS if name in named)
    for x in (*preferred, *values):
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
            return x
    raise InputError(f"{type(model).__name__} returned {type(raw).__name__}, in which there is no tensor to compare")


def _arguments(model: nn.Module) -> set[str]:
    """The names of the arguments of a model; with **kwargs also of the models of transformers inside it."""
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parts = [part for part in model.children() if hasattr(part, "main_input_name")]
        names.update(*(_arguments(part) for part in parts))
    return names


def _as_mapping(batch: Any, parameters: Mapping[str, inspect.Parameter]) -> tuple[dict[str, Any], bool]:
    """The batch as name -> value, and whether it must be given by position, since the arguments have no names."""
    check_batch(batch)
    if isinstance(batch, Mapping):
        return {str(name): x for name, x in batch.items() if x is not None}, False
    values = [batch] if isinstance(batch, Tensor) else list(batch)
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(names) < len(values):
        return {f"input {i}": x for i, x in enumerate(values)}, True
    return {name: x for name, x in zip(names, values, strict=False) if x is not None}, False
