"""Whether the forward pass of a model on a slice is a part of its forward pass on the whole sequence.

Attention is exchanged between the ranks; everything else must treat each token by itself.  So, with attention replaced
by a function of single tokens, the last of a few tokens must come out the same without those before them.  They do
not in models that number tokens from the beginning of what they are given, and in those with convolutions, recurrences
or attention that does not go through transformers' attention interface.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.distributed.collectives import Ranks
from headwise.errors import HeadwiseError, InputError, UnsupportedError
from headwise.models.pretrained import attention_functions
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.models.run import as_it_was

NAME = "headwise-token-by-token"

TOKENS = 16
"""Of this rank's slice, with which the model is tried."""

AGREEMENT = {2: 5e-2, 4: 1e-4, 8: 1e-6}
"""By bytes of a number: largest difference, relative to the largest entry, that is rounding."""

NOT_TRIED = ("labels", "past_key_values", "use_cache", "logits_to_keep", "output_attentions")

PASSED: weakref.WeakKeyDictionary[nn.Module, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""The models that treat tokens one by one, given arguments of these names, with padding or without."""

ONE_PROCESS = "run it with one process"


class ShardedInputs:
    """Hooks on every part of `model` that is a model itself: the outermost call is checked, and on all ranks alike."""

    def __init__(self, model: nn.Module, ranks: Ranks, zigzag: bool) -> None:
        self.ranks, self.zigzag = ranks, zigzag
        self._running: nn.Module | None = None
        self._checking = False
        self._handles: list[Any] = []
        for part in model.modules():
            if is_pretrained(part):
                self._handles += [
                    part.register_forward_pre_hook(self._before, with_kwargs=True),
                    part.register_forward_hook(self._after, always_call=True),
                ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if self._running is not None or self.ranks.size == 1 or torch.compiler.is_compiling():
            return None
        self._running = model
        problem, given = None, dict[str, Any]()
        names, key = tuple[str, ...](), tuple[Any, ...]()
        self._checking = True
        try:
            given = _by_name(model, args, kwargs)
            names = tuple(sorted(given))
            _check_names(model, given)
            mask = given.get("attention_mask")
            key = (*names, isinstance(mask, Tensor) and not bool((mask != 0).all()))
            if key not in PASSED.get(model, ()):
                _check_tokens(model, given, self.zigzag)
        except HeadwiseError as error:
            problem = str(error)
        except Exception as error:  # on this rank only, perhaps: the others must not wait for it
            agree(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", "an error", self.ranks, error)
        finally:
            self._checking = False
        agree(problem, f"{type(model).__name__} with {', '.join(names)}", self.ranks)
        PASSED.setdefault(model, set()).add(key)
        parameters = list(inspect.signature(model.forward).parameters)
        if self.zigzag and "attention_mask" in parameters[len(args) :] and "attention_mask" not in names:
            # without a mask transformers takes a jump in position_ids for the beginning of another sequence
            tokens = _tokens(model, given)
            kwargs = {**kwargs, "attention_mask": torch.ones(tokens.shape[:2], device=tokens.device)}
        return args, kwargs

    def _after(self, model: nn.Module, args: tuple, output: Any) -> None:
        if self._running is model and not self._checking:
            self._running = None


def agree(problem: str | None, said: str, ranks: Ranks, own: Exception | None = None) -> None:
    """Raise on every rank if there is a problem on one, which raises `own`, or if they say different things."""
    sayings = told(problem, said, ranks, own)
    other = next((rank for rank, saying in enumerate(sayings) if saying != said), None)
    if other is not None:
        raise InputError(
            f"sequence_parallel_model: all ranks must make the same call, but rank {ranks.rank} calls {said}, and rank "
            f"{other} calls {sayings[other]}"
        )


def told(problem: str | None, fact: Any, ranks: Ranks, own: Exception | None = None) -> list[Any]:
    """`fact` of every rank; raise on every rank if there is a problem on one."""
    found: list[Any] = [(problem, fact)]
    if ranks.size > 1:
        found = [None] * ranks.size
        ranks.call(dist.all_gather_object, found, (problem, fact))
    if own is not None:
        raise own
    problem = problem or next((f"{other} (on rank {rank})" for rank, (other, _) in enumerate(found) if other), None)
    if problem is not None:
        raise UnsupportedError(problem)
    return [fact for _, fact in found]


def _by_name(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are given, by the names of the model's parameters."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{type(model).__name__}: {error}") from error
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return {name: x for name, x in given.items() if x is not None}


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _tokens(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
    """(b, n) ids, or (b, n, width) embeddings."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        if isinstance(given.get(name), Tensor) and given[name].dim() >= 2:
            return given[name]
    names = ", ".join(given) or "nothing"
    raise UnsupportedError(
        f"sequence_parallel_model: {type(model).__name__} was given {names}, but only input_ids or inputs_embeds "
        f"(b, n, …) are tokens that ranks can hold parts of; {ONE_PROCESS}"
    )


def _check_names(model: nn.Module, given: Mapping[str, Any]) -> None:
    if not _tokens(model, given).shape[1]:
        raise InputError(
            "sequence_parallel_model: this rank has no tokens, which transformers' models cannot reshape; give every "
            "rank one or more"
        )
    if "labels" in given:
        raise UnsupportedError(
            "sequence_parallel_model: the loss for labels would be a mean over this rank's tokens that leaves out the "
            "prediction of the next rank's first token; compute the loss from the logits, with targets shifted before "
            "they are cut"
        )
    cache = given.get("past_key_values")
    if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length()):
        raise UnsupportedError(
            "sequence_parallel_model: a cache (past_key_values) is not supported (pass use_cache=False)"
        )


@torch.no_grad()
def _check_tokens(model: nn.Module, given: Mapping[str, Any], zigzag: bool) -> None:
    """UnsupportedError unless tokens come out the same without those before them, attention left out."""
    owner, n = type(model).__name__, _tokens(model, given).shape[1]
    options = {name: x for name, x in given.items() if name not in NOT_TRIED}
    if _takes(model, "use_cache"):
        options["use_cache"] = False
    with _token_by_token(model) as calls, as_it_was(model):

        def run(start: int, stop: int, **changed: Any) -> list[Tensor]:
            calls.clear()
            part = {name: _part(name, x, n, start, stop) for name, x in {**options, **changed}.items()}
            output = model(**{name: x for name, x in part.items() if x is not None})
            return [*calls, next(iter(output.values() if isinstance(output, Mapping) else output))]

        count = min(n, TOKENS)
        if count > 1:
            cut = count // 2
            whole, part = run(0, count), run(cut, count)
            if whole[-1].dim() < 2 or whole[-1].shape[1] != count or part[-1].shape[1] != count - cut:
                raise UnsupportedError(
                    f"sequence_parallel_model: {owner} returns {tuple(whole[-1].shape)} for {count} tokens, so it "
                    f"chooses or pools tokens, of which a rank has only its own; run its base model ({_base(model)}), "
                    "and pool the hidden states of all ranks"
                )
            if not _same([x[:, cut:] if x.shape[1] == count else x for x in whole], part):
                raise UnsupportedError(f"sequence_parallel_model: {_reason(model, given)}")
        count = min(-(-n // 2) if zigzag else n, TOKENS)  # a run of positions
        first = _beginning(model, given, count)
        if not bool(first.any()):
            return
        own, said = ([x[first] for x in run(0, count, **more)] for more in ({"position_ids": None}, {}))
        if _same(own, said):
            return
        offset, hint = _first_position(model), "it numbers the whole text itself (by its attention_mask, for one)"
        if offset and _same(own, [x[first] for x in run(0, count, position_ids=given["position_ids"] + offset)]):
            hint = f"held.positions(rank) + {offset}: its first token has position padding_idx + 1"
    raise UnsupportedError(
        f"sequence_parallel_model: {owner} does not number these tokens 0, 1, …; pass position_ids as {hint}"
    )


def _reason(model: nn.Module, given: Mapping[str, Any]) -> str:
    owner = type(model).__name__
    if not _takes(model, "position_ids"):
        return (
            f"{owner} takes no position_ids, and its tokens come out differently without those before them: it numbers "
            f"them itself, or mixes them outside of its attention function; {ONE_PROCESS}"
        )
    if "position_ids" not in given:
        return (
            f"{owner} was called without position_ids, and would number the tokens of each rank from the beginning; "
            "pass position_ids=held.positions(rank).unsqueeze(0)"
        )
    return (
        f"{owner} mixes tokens outside of transformers' attention function (a convolution, a recurrence, attention "
        f"written by hand), of which a rank sees only its own; {ONE_PROCESS}"
    )


def _part(name: str, x: Any, n: int, start: int, stop: int) -> Any:
    """Tokens start to stop of an argument, if it has an entry for each of n."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    if x.shape[1] == n and not (name == "position_ids" and x.dim() == 3):
        return x[:, start:stop]
    return x[..., start:stop] if x.shape[-1] == n else x


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape and float((x - y).abs().amax()) <= AGREEMENT[x.element_size()] * float(y.abs().amax())
        for x, y in zip(one, other, strict=True)
        if x.is_floating_point() and x.numel()
    )


def _beginning(model: nn.Module, given: Mapping[str, Any], count: int) -> Tensor:
    """(b, count), True: tokens that are no padding of sequences whose positions are said to be 0, 1, …"""
    batch, positions, mask = len(_tokens(model, given)), given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() > 2:
        return torch.zeros(batch, count, dtype=torch.bool)
    positions = positions[..., :count]
    rows = (positions == torch.arange(count, device=positions.device)).all(-1).reshape(-1, 1)
    tokens = rows.expand(batch, count)
    return tokens & (mask[:, :count] != 0) if isinstance(mask, Tensor) and mask.dim() == 2 else tokens


def _first_position(model: nn.Module) -> int:
    """That of the first token in models that number tokens from padding_idx + 1, as RoBERTa does."""
    padding = getattr(model.config, "pad_token_id", None)
    return 0 if padding is None else int(padding) + 1


def _base(model: nn.Module) -> str:
    return type(getattr(model, "base_model", model)).__name__


@contextmanager
def _token_by_token(model: nn.Module) -> Iterator[list[Tensor]]:
    """Attention as a function of each token's own query, key and value, which are collected, as (b, n, …)."""
    calls: list[Tensor] = []
    attention_functions.register(NAME, _Collected(calls), _no_mask)
    undo = attention_functions.use(model, NAME)
    try:
        yield calls
    finally:
        undo()
        attention_functions.register(NAME, _Collected([]), _no_mask)


class _Collected:
    def __init__(self, calls: list[Tensor]) -> None:
        self.calls = calls

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """(b, h, n, ·) -> (b, n, h, d)"""
        self.calls += [x.transpose(1, 2) for x in (query, key, value)]
        out = value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)
        if key.shape[-2] != query.shape[-2]:  # cross-attention
            out = out.new_zeros(out.shape[0], query.shape[-2], *out.shape[2:])
        return out.contiguous(), None


def _no_mask(*args: Any, **options: Any) -> None:
    return None
