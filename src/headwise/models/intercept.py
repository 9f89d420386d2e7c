"""Intercept every attention call of a model, named after the module that makes it.

    with intercept(model, see):          # see(call) is called for every attention call, in order
        model(**batch)

A call holds the q, k, v, scale and mask that the model uses: after rotary embeddings, with grouped queries.  The calls
are seen by a `TorchFunctionMode`, to which torch reports every function that this thread calls, by whatever name it was
imported or stored; attention that is written out by hand is recognised too (`provenance.written_out`), but cannot be
answered.  So no model family needs code of its own here, nothing is replaced, the model is not touched (the
module that makes a call is found on the stack of running calls), and any number of threads may intercept at once.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise.errors import HeadwiseError
from headwise.models.pretrained.attention_functions import supports_sdpa
from headwise.models.provenance.attention_kind import Provenance, attention_kind
from headwise.models.provenance.written_out import WrittenAttention, WrittenOut, mask_of_scores
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask
from headwise.operators.softmax import Softmax

ATTENTION = frozenset(
    {
        torch._C._nn.scaled_dot_product_attention,  # pyright: ignore[reportAttributeAccessIssue]  # the one of F
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
"""The function by each of its names."""

COMPILERS = {"torch._dynamo", "torch.nn.attention.flex_attention"}
"""Modules of torch without which nothing is compiled; importing the first takes a second."""

MULTI_HEAD_ATTENTION = F.multi_head_attention_forward
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
"""Names that modules give the number of their heads."""


class InterceptionError(HeadwiseError):
    """Attention that cannot be intercepted, or an interception inside another."""


class SdpaArguments(NamedTuple):
    """The arguments of scaled_dot_product_attention with batch and head axes, and its mask as a `Mask`."""

    q: Tensor  # (b, h, m, k)
    k: Tensor  # (b, g, n, k), g key/value heads
    v: Tensor  # (b, g, n, d)
    mask: Mask
    scale: float


def read_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sequences: int = 1,
) -> SdpaArguments:
    """Read a call: read_sdpa(*args, **kwargs) for scaled_dot_product_attention(*args, **kwargs).

    sequences   how many of them are in the first axis of operands (b h, rows, width), which have no axis of heads
    """
    q, k, v = (four_axes(x, sequences) for x in (query, key, value))
    m, n = q.shape[-2], k.shape[-2]
    if attn_mask is not None and query.dim() == 3 and attn_mask.dim() == 3:
        attn_mask = attn_mask if len(attn_mask) == 1 else attn_mask.unflatten(0, (sequences, -1))
    elif attn_mask is not None and query.dim() > 4 and attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:]).flatten(0, -4)
    mask = Mask.from_sdpa(attn_mask, is_causal, m, n, device=q.device)
    return SdpaArguments(q, k, v, mask, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale))


def four_axes(x: Tensor, sequences: int = 1) -> Tensor:
    """x as (b, h, rows, width): more batch axes are flattened, missing ones added, (b h, rows, width) is split."""
    if x.dim() == 3:
        return x.unflatten(0, (sequences, -1))
    return x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x.reshape(*(1,) * (4 - x.dim()), *x.shape)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: its site in the model and its operands."""

    site: str  # name of the module that made the call, with @i for its i-th use in one forward pass
    module: nn.Module
    kind: str  # "self", or "cross" if the keys are computed from another tensor than the queries
    q: Tensor  # (b, h, m, k); b = sequences of the batch x windows
    k: Tensor  # (b, h, n, k)
    v: Tensor  # (b, h, n, d)
    mask: Mask  # with batch axes (b, h)
    scale: float
    groups: int  # key/value heads before they were repeated for grouped queries
    windows: int = 1  # into which the model cuts each sequence, such as an image: entries i windows ... of axis b

    @property
    def causal(self) -> bool:
        return self.mask.hides_later_keys()

    @property  # cached, a call that is its own result would keep its operands until the garbage collector runs
    def measurable(self) -> AttentionCall:
        """The same call on the CPU and in float32 or float64, whatever device and precision the model runs in."""
        precise = torch.promote_types(self.q.dtype, torch.float32)
        if self.q.device.type == "cpu" and self.q.dtype == self.k.dtype == self.v.dtype == precise:
            return self
        q, k, v = (x.to("cpu", precise) for x in (self.q, self.k, self.v))
        key_mask, pair_mask, bias = (
            None if x is None else x.cpu() for x in (self.mask.key_mask, self.mask.pair_mask, self.mask.attn_bias)
        )
        bias = None if bias is None else bias.to(precise)
        mask = replace(self.mask, key_mask=key_mask, pair_mask=pair_mask, attn_bias=bias)
        return replace(self, q=q, k=k, v=v, mask=mask)


Answer = Callable[[str, Callable[..., Tensor], tuple, dict], Tensor]
"""(site, the original function, its args, its kwargs) -> the output that the model gets instead."""


@contextlib.contextmanager
def intercept(
    model: nn.Module, see: Callable[[AttentionCall], None] | None = None, *, answer: Answer | None = None
) -> Iterator[None]:
    """Call `see` for every attention call of `model` in this thread while the context is open; always undone.

    `answer` is called instead of the function, with gradients.  Attention that `see` or `answer` compute themselves is
    not intercepted.  Compiled parts of the model run uncompiled.
    """
    if getattr(_THREAD, "is_open", False):
        raise InterceptionError("intercept: another interception is open in this thread; close it first")
    _check_runs_here(model)
    interception = _Interception(model, see, answer)
    _THREAD.is_open = True
    try:
        with _UNCOMPILED, interception:
            yield
    finally:
        _THREAD.is_open = False
        interception.present_pass = None  # a frame keeps everything in it alive


class Running(NamedTuple):
    """A call of a module that is running: the arguments that it was called with are in the frame."""

    name: str
    module: nn.Module
    frame: FrameType

    @property
    def args(self) -> tuple:
        return self.frame.f_locals["args"]

    @property
    def kwargs(self) -> dict:
        return self.frame.f_locals["kwargs"]


class AttentionMode(TorchFunctionMode):
    """A context that computes the attention calls of this thread by `attend`, which a subclass defines."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: tuple[tuple, dict] | None = None  # arguments of the latest call inside of multi_head_attention
        self.is_inside = False

    @abstractmethod
    def attend(self, function: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """The output of one call function(*args, **kwargs) of scaled_dot_product_attention."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called by torch instead of `func`; what is called in here does not come back to this mode."""
        kwargs = kwargs or {}
        if func in ATTENTION:
            if self.is_inside:
                self.latest = args, kwargs
            return self.attend(func, args, kwargs)
        if func is MULTI_HEAD_ATTENTION or func is F.multi_head_attention_forward:
            return self.multi_head_attention(args, kwargs)
        return func(*args, **kwargs)

    def multi_head_attention(self, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
        """torch's own layer; where it is to return weights, it never calls the function for attention."""
        # a copy of the function that does not ask for modes, so that its body can run inside this one
        body = FunctionType(MULTI_HEAD_ATTENTION.__code__, {**vars(F), "has_torch_function": lambda tensors: False})
        body.__kwdefaults__, body.__defaults__ = MULTI_HEAD_ATTENTION.__kwdefaults__, MULTI_HEAD_ATTENTION.__defaults__
        self.is_inside = kwargs.get("need_weights", True)
        with self:
            out, _ = body(*args, **{**kwargs, "need_weights": False})
        self.is_inside, latest, self.latest = False, self.latest, None
        if latest is None:
            return out, None
        q, k, _, mask, scale = read_sdpa(*latest[0], **latest[1])
        weights = Softmax(Scores(q, k, scale, mask)).dense().to(q.dtype)
        weights = weights.mean(1) if kwargs.get("average_attn_weights", True) else weights
        return out, weights.squeeze(0) if args[0].dim() == 2 else weights


class _Interception(AttentionMode):
    """One open context: the names of the modules of its model, and what it has seen."""

    def __init__(self, model: nn.Module, see: Callable[[AttentionCall], None] | None, answer: Answer | None) -> None:
        super().__init__()
        self.see, self.answer = see, answer
        self.names = {id(module): name for name, module in model.named_modules()}
        self.uses: Counter[str] = Counter()  # attention calls of each module in the present forward pass
        self.present_pass: FrameType | None = None
        self.provenance = None if see is None else Provenance()
        self.written_out = None if self.provenance is None else WrittenOut(self.provenance)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        if self.provenance is not None and self.written_out is not None:
            self.provenance.note(args, kwargs, out)
            written = self.written_out.note(func, args, kwargs, out)
            if written is not None:
                self._see_written(written)
        return out

    def _see_written(self, written: WrittenAttention) -> None:
        """Show attention that the model wrote out; it has been computed."""
        calls = running_calls(self.names, sys._getframe(1))
        if calls and self.see is not None:
            site = self._site(calls)
            with torch.no_grad():
                self.see(_written_call(calls, site, written, self.provenance))

    def attend(self, function: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        calls = running_calls(self.names, sys._getframe(1))
        if not calls:
            return function(*args, **kwargs)
        site = self._site(calls)
        if self.see is not None:
            with torch.no_grad():
                self.see(_attention_call(calls, site, args, kwargs, self.provenance))
        return function(*args, **kwargs) if self.answer is None else self.answer(site, function, args, kwargs)

    def _site(self, calls: Sequence[Running]) -> str:
        """The name of the module that makes this call, with @i for its i-th use in one forward pass."""
        if calls[-1].frame is not self.present_pass:
            self.present_pass = calls[-1].frame
            self.uses.clear()
            if self.provenance is not None:
                self.provenance.forget_earlier_passes()
        if self.provenance is not None:
            self.provenance.mark()
        name = calls[0].name
        self.uses[name] += 1
        return name if self.uses[name] == 1 else f"{name}@{self.uses[name]}"


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile(module) wraps, so that names are those of the module."""
    return getattr(model, "_orig_mod", model)


def is_checkpointed(outermost: CodeType) -> bool:
    """Whether torch.utils.checkpoint has called this, inside of the running call of `outermost`.

    It computes its part again in the backward pass, outside of a mode that was open in the forward pass.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not outermost:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def running_calls(names: dict[int, str], frame: FrameType | None) -> list[Running]:
    """The calls of modules (id -> name) on the stack of `frame`, innermost first."""
    calls = []
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            module = frame.f_locals["self"]
            name = names.get(id(module))
            if name is not None:
                calls.append(Running(name, module, frame))
        frame = frame.f_back
    return calls


class _Uncompiled:
    """A context in which torch.compile is without effect.

    The switch is one for all threads: it is off while any interception is open, and other threads then run compiled
    code as it was written, with the same result to rounding.
    """

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), 0
        self._switch: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._switch is None and not COMPILERS.isdisjoint(sys.modules):
                self._switch = torch.compiler.set_stance("force_eager")
                self._switch.__enter__()

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._switch is not None:
                self._switch.__exit__(None, None, None)
                self._switch = None


_MODULE_CALL = nn.Module._call_impl.__code__
_THREAD = threading.local()
_UNCOMPILED = _Uncompiled()


def _check_runs_here(model: nn.Module) -> None:
    """Raise InterceptionError for a wrapper whose attention does not run in this thread."""
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            where = f"{type(model).__name__}.{name}" if name else type(model).__name__
            raise InterceptionError(f"{where} runs copies of its module in other threads; give {where}.module instead")


def _attention_call(
    calls: Sequence[Running], site: str, args: tuple, kwargs: dict, provenance: Provenance | None
) -> AttentionCall:
    query, key = (x if x is not None else args[i] for i, x in enumerate((kwargs.get("query"), kwargs.get("key"))))
    kind = attention_kind(calls, query, key, (query.shape[-2], key.shape[-2]), provenance)
    batch = _batch_sizes((*calls[-1].args, *calls[-1].kwargs.values()))
    sequences = _sequences(calls[0].module, len(query), batch) if query.dim() == 3 else 1
    q, k, v, mask, scale = read_sdpa(*args, **kwargs, sequences=sequences)
    q, k, v, groups = q.detach(), k.detach(), v.detach(), k.shape[1]
    if groups != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    mask = _without_padding(mask, kind, len(q), calls[-1])
    return AttentionCall(site, calls[0].module, kind, q, k, v, mask, scale, groups, _windows(len(q), batch))


def _written_call(
    calls: Sequence[Running], site: str, written: WrittenAttention, provenance: Provenance | None
) -> AttentionCall:
    """Its scores are an additive bias to queries and keys of zeros, which have the width of the model's own."""
    scores, v = written.scores, written.v
    m, n = scores.shape[-2:]
    if scores.dim() == 5 and scores.shape[1] != scores.shape[2] and scores.shape[1] == _heads(calls[0].module):
        scores, v = scores.transpose(1, 2), v.transpose(1, 2)  # heads before windows
    kind = attention_kind(calls, written.query, written.key, (m, n), provenance)
    batch = _batch_sizes((*calls[-1].args, *calls[-1].kwargs.values()))
    sequences = _sequences(calls[0].module, len(scores), batch) if scores.dim() == 3 else 1
    scores, v = four_axes(scores, sequences), four_axes(v, sequences)
    b, h = scores.shape[:2]
    q, k = (v.new_zeros(1, 1, 1, written.key_width).expand(b, h, rows, -1) for rows in (m, n))
    mask = _without_padding(mask_of_scores(scores), kind, b, calls[-1])
    return AttentionCall(site, calls[0].module, kind, q, k, v, mask, 1.0, h, _windows(b, batch))


def _without_padding(mask: Mask, kind: str, b: int, outermost: Running) -> Mask:
    """The mask of b sequences without padding that no real token attends to, but that attends to itself.

    Which tokens are real is said by the `attention_mask` that the model was called with, if not by the mask.
    """
    real, is_own = outermost.kwargs.get("attention_mask"), kind == "self" and mask.key_mask is None
    if getattr(getattr(outermost.module, "config", None), "is_encoder_decoder", False):
        return mask  # it says nothing of the decoder
    if not is_own or not isinstance(real, Tensor) or real.shape != (b, mask.n) or mask.m != mask.n or bool(real.all()):
        return mask
    real, pairs = real.bool(), mask.pairs(real.device)
    if pairs is None:
        return mask
    kept = real | (pairs & real[:, None, :, None]).any(-2).any(1)
    return mask if bool(kept.all()) else replace(mask, key_mask=kept[:, None])


def _batch_sizes(values: Iterable[Any]) -> list[int]:
    """Sizes that the batch axis of a model's inputs may have: the first axis, or the second of (rows, batch, width)."""
    tensors = [x for x in values if isinstance(x, Tensor) and x.dim() > 1]
    return list(dict.fromkeys([len(x) for x in tensors] + [x.shape[1] for x in tensors if x.dim() == 3]))


def _sequences(module: nn.Module, size: int, batch: Sequence[int]) -> int:
    """b of an axis of size b h."""
    heads = _heads(module)
    if heads is not None and size % heads == 0:
        return size // heads
    return next((b for b in batch if size % b == 0), 1)


def _heads(module: nn.Module) -> int | None:
    return next((x for x in (getattr(module, name, None) for name in HEADS) if isinstance(x, int) and x > 0), None)


def _windows(size: int, batch: Sequence[int]) -> int:
    """w of an axis of size b w, where the model cuts each of b sequences into w windows."""
    return 1 if size in batch else next((size // b for b in batch if size % b == 0), 1)


def nothing_seen(model: nn.Module) -> InterceptionError:
    """The error for a model that never called scaled_dot_product_attention in this thread."""
    classes = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
    names = ", ".join(classes) or "no class with 'attention' in its name"
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    by_hand = "compute it through headwise.models.attention(q, k, v, attn_mask) in its forward"
    if not classes:
        advice = f"it seems to have no attention; if it has, {by_hand}"
    elif any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        advice = "if it runs in another thread, run all of the model in one"
    elif not supports_sdpa(model) and getattr(model, "_can_set_attn_implementation", lambda: False)():
        advice = "its family has only eager attention, which plans cannot change; headwise.replace can"
    elif implementation not in (None, "sdpa") and getattr(model, "_supports_sdpa", False):
        advice = f'load it with attn_implementation="sdpa", or, if its attention is written by hand, {by_hand}'
    else:
        advice = f"its attention is written by hand: to see it, {by_hand}"
    return InterceptionError(
        f"{type(model).__name__} never called scaled_dot_product_attention in this thread (found: {names}); {advice}"
    )
