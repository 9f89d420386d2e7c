"""The same attention computed in two ways, and rows of P that sum to one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.ledger.model_audit.audited_model import BLUNT, SAFETY, AuditedModel, NotTriedError
from headwise.ledger.model_audit.promise import Promise, Standing
from headwise.models.intercept import ATTENTION, intercept, read_sdpa
from headwise.models.pretrained.attention_functions import implementations
from headwise.models.provenance.attention_kind import Provenance, tensors
from headwise.models.provenance.written_out import ADDED_PRODUCTS, PRODUCTS, SOFTMAX
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax

MIXING = PRODUCTS | ADDED_PRODUCTS | ATTENTION | {F.linear, F.multi_head_attention_forward}
FORMS, ROWS = "eager = sdpa", "rows of P sum to one"


def check_forms(audited: AuditedModel) -> Promise:
    """transformers' two implementations agree; for other models, torch's fused function and the formula."""
    if not audited.is_transformers:
        calls = 0

        def formula(site: str, function: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
            nonlocal calls
            calls += 1
            return written_out(args, kwargs)

        with intercept(audited.model, answer=formula):
            other = audited.run(audited.batch)
        if not calls:
            raise NotTriedError("it never calls scaled_dot_product_attention, so there is no second form")
        first, kept = audited.reference, f"{calls} calls of scaled_dot_product_attention give what the formula gives."
    else:
        with using(audited.model, "eager"):
            other = audited.run(audited.batch)
        with using(audited.model, "sdpa"), counted() as fused:
            first = audited.run(audited.batch)
        if not fused:
            raise NotTriedError("with sdpa it does not call scaled_dot_product_attention either")
        kept = "Both implementations of attention give the same."
    distance, (b, i) = audited.worst(other, first)
    return audited.verdict(
        FORMS,
        distance,
        f"sequence {b}, position {i}",
        kept=kept,
        violated="The two implementations of attention differ: in a mask, a scale, or something that one leaves out.",
    )


def written_out(args: tuple, kwargs: dict) -> Tensor:
    """softmax(scale q k^T + mask) v, from the arguments of scaled_dot_product_attention."""
    query, value = (kwargs.get(name, args[i] if len(args) > i else None) for i, name in ((0, "query"), (2, "value")))
    assert isinstance(query, Tensor)
    assert isinstance(value, Tensor)
    q, k, v, mask, scale = read_sdpa(*args, **kwargs)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    p = Softmax(Scores(q, k, scale, mask)).dense().to(v.dtype)
    return (p @ v).reshape(*query.shape[:-1], value.shape[-1])


@contextlib.contextmanager
def using(model: nn.Module, implementation: str) -> Iterator[None]:
    """A model of transformers with another attention implementation; NotTriedError if it has no choice."""
    can_set = getattr(model, "_can_set_attn_implementation", None)
    change = getattr(model, "set_attn_implementation", None)
    if can_set is None or change is None or not can_set():
        raise NotTriedError("its attention implementation cannot be chosen")
    if implementation == "sdpa" and not getattr(model, "_supports_sdpa", False):
        raise NotTriedError("it has no sdpa implementation")
    undo = implementations(model)
    try:
        try:
            change(implementation)
        except (ValueError, ImportError, AttributeError) as error:
            raise NotTriedError(f"it cannot be set to {implementation} ({str(error).splitlines()[0]})") from error
        yield
    finally:
        undo()


class _Fused(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in ATTENTION:
            self.calls.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    calls: list[Any] = []
    with _Fused(calls):
        yield calls


class _RowSums(TorchFunctionMode):
    """Follows every softmax to the product with values."""

    def __init__(self) -> None:
        super().__init__()
        self.provenance = Provenance()
        self.weights: set[int] = set()  # numbers of the results of a softmax
        self.sums: list[tuple[float, str]] = []  # largest |row sum - 1|, and where
        self.keys = 1  # the largest number of terms of a sum

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in MIXING:  # what is computed from weights by a product is no longer weights
            self.provenance.note(args, kwargs, out)
        if func in SOFTMAX and out.dim() >= 3:
            self.weights.add(self.provenance.number(out))
        elif func in PRODUCTS and isinstance(out, Tensor) and out.dim() >= 3:
            self._product(tensors((*args, *kwargs.values()))[-2:], args)
        return out

    def answer(self, site: str, function: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """A fused call, made once more with values of ones."""
        if "value" in kwargs:
            ones = function(*args, **{**kwargs, "value": torch.ones_like(kwargs["value"])})
        else:
            ones = function(*args[:2], torch.ones_like(args[2]), *args[3:], **kwargs)
        self._note(ones, site, kwargs["key"].shape[-2] if "key" in kwargs else args[1].shape[-2])
        return function(*args, **kwargs)

    def _product(self, factors: list[Tensor], args: tuple) -> None:
        if len(factors) < 2 or isinstance(args[0], str):  # einsum may sum over any axis
            return
        p = factors[0]
        if min(p.shape[-2:]) < 2 or p.dim() < 3 or not self.provenance.sources(p, self.weights, same_size=True):
            return
        self._note(p.detach().double().sum(-1), f"attention call {len(self.sums)}, written out", p.shape[-1])

    def _note(self, sums: Tensor, how: str, keys: int) -> None:
        """Rows that see no key at all are zero by convention."""
        sums, self.keys = sums.double(), max(self.keys, keys)
        gap = torch.where(sums == 0, 0.0, (sums - 1).abs())
        gap = torch.where(gap.isnan(), torch.inf, gap)
        at = [int(x) for x in torch.unravel_index(gap.argmax(), gap.shape)]
        self.sums.append((gap.amax().item(), f"{how}, entry {at}"))


def check_rows(audited: AuditedModel) -> Promise:
    """P 1 = 1, as the model computes it: by its fused calls with values of ones, and where it writes a softmax out."""
    found: list[tuple[float, str]] = []
    keys = 1
    for implementation in (None, "eager"):
        watch = _RowSums()
        try:
            with contextlib.ExitStack() as stack:
                if implementation is not None:
                    stack.enter_context(using(audited.model, implementation))
                stack.enter_context(watch)
                stack.enter_context(intercept(audited.model, answer=watch.answer))
                audited.run(audited.batch)
        except NotTriedError:
            continue
        found, keys = found + watch.sums, max(keys, watch.keys)
    if not found:
        raise NotTriedError("no softmax that is multiplied with values was seen")
    gap, where = max(found)
    floor = torch.finfo(audited.dtype).eps * keys**0.5
    if gap <= min(SAFETY * floor, BLUNT):
        return Promise(ROWS, Standing.KEPT, f"In {len(found)} attention calls every row sums to one.", gap, floor)
    sentence = "Rows of attention weights do not sum to one (absolute); is the softmax over another axis than the keys?"
    return Promise(ROWS, Standing.VIOLATED, sentence, gap, floor, where)
