"""OperatorHeads in the attention modules of a model, which keep their parameters and their names.

    nn.MultiheadAttention                 its class becomes a subclass that computes P v
    a module of transformers              the library's attention interface, as in `transformers_attention`
    any other module that calls           its class becomes a subclass whose forward computes those calls by P v,
    scaled_dot_product_attention          by a mode that torch.compile and torch.export can trace

Nothing is added to the state dict unless the operator has parameters of its own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import UnsupportedError
from headwise.models.intercept import AttentionMode, is_checkpointed, nothing_seen, read_sdpa
from headwise.models.pretrained.derived_models import is_pretrained
from headwise.nn.drop_in import TorchSignature
from headwise.nn.multihead import check_convertible, torch_biases, torch_weights
from headwise.operators.masks import Mask
from headwise.replacement.install import transformers_attention as interface
from headwise.replacement.install import transformers_models
from headwise.replacement.install.operator_heads import OperatorHeads

SDPA = "scaled_dot_product_attention"


def attention_sites(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute attention, by name; the model itself if it is not known which of its modules do."""
    pretrained = {id(part) for each in model.modules() if is_pretrained(each) for part in each.modules()}
    sites = {}
    for name, module in model.named_modules():
        known = id(module) in pretrained and transformers_models.calls_interface(module)
        if known or _calls_sdpa(type(module)) or is_multihead(module):
            sites[name] = module
    inner = {
        name: x
        for name, x in sites.items()
        if not any(other.startswith(f"{name}." if name else "") for other in sites if other != name)
    }
    return inner or {"": model}


def is_multihead(module: nn.Module) -> bool:
    """Whether it computes what nn.MultiheadAttention computes."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def install(module: nn.Module, heads: OperatorHeads) -> Callable[[], None]:
    """Put `heads` into `module`; returns the function that takes them out again."""
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{heads.where}: the forward of this {type(module).__name__} was replaced by another function, so what it "
            "computes is not known; restore it first"
        )
    before = type(module)
    if is_multihead(module):
        check_convertible(heads.where, module)  # type: ignore[arg-type]
        after: type = _subclass(before, _Multihead)
    elif transformers_models.calls_interface(module):
        after = before
    else:
        after = _subclass(before, _Scope)
    like = next(module.parameters(), None)
    heads = heads if like is None else heads.to(like.device, like.dtype)
    module.add_module(interface.NAME, heads.train(module.training))
    module.__class__ = after

    def undo() -> None:
        if type(module) is after and hasattr(module, interface.NAME):
            delattr(module, interface.NAME)
            module.__class__ = before

    return undo


class _Multihead(TorchSignature):
    """Over the parameters of an nn.MultiheadAttention."""

    headwise: OperatorHeads
    _qkv_same_embed_dim = property(lambda self: False, lambda self, value: None)  # no fused path in encoder layers

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        parts = zip((query, key, value), torch_weights(module)[:3], torch_biases(module)[:3], strict=True)
        heads = (F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)) for x, weight, bias in parts)
        q, k, v = (x.transpose(1, 2) for x in heads)
        dropout = module.dropout if self.training else 0.0
        scale = 1 / math.sqrt(q.shape[-1])
        out, weights = self.headwise(q, k, v, mask, scale=scale, dropout=dropout, need_weights=need_weights)
        return module.out_proj(out.transpose(1, 2).flatten(2)), weights


class _Scope(nn.Module):
    """In its forward, calls of scaled_dot_product_attention are computed by the operator."""

    headwise: OperatorHeads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode = _Answers(self.headwise, has_gradients=torch.is_grad_enabled())
        with mode:
            out = super().forward(*args, **kwargs)
        if not mode.has_answered:
            raise nothing_seen(self)
        return out


class _Answers(AttentionMode):
    """Attention calls by `heads`."""

    def __init__(self, heads: OperatorHeads, *, has_gradients: bool) -> None:
        super().__init__()
        self.heads, self.has_gradients, self.has_answered = heads, has_gradients, False

    def attend(self, function: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        self.has_answered = True
        if self.has_gradients and not torch.compiler.is_compiling() and is_checkpointed(_Scope.forward.__code__):
            raise UnsupportedError(
                f"{self.heads.where}: torch.utils.checkpoint is called inside of this module and computes its "
                "attention again in the backward pass, as it was before; switch it off, or checkpoint the whole module"
            )
        q, k, v, mask, scale = read_sdpa(*args, **kwargs)
        dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        out, _ = self.heads(q, k, v, mask, scale=scale, dropout=dropout)
        query = args[0] if args else kwargs["query"]
        return out.reshape(*query.shape[:-1], out.shape[-1])

    def multi_head_attention(self, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None]:
        if kwargs.get("need_weights", True):
            raise UnsupportedError(
                f"{self.heads.where}: multi_head_attention_forward with need_weights=True returns the weights of "
                "softmax attention; pass need_weights=False, or use nn.MultiheadAttention"
            )
        return super().multi_head_attention(args, kwargs)


@functools.cache  # one subclass per class, so that isinstance works
def _subclass(base: type, part: type) -> type:
    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _blank, (base, part), self.__dict__  # the class is generated, so it cannot be imported

    return type(
        base.__name__, (part, base), {"__reduce__": reduce, "__module__": base.__module__, "__doc__": base.__doc__}
    )


def _blank(base: type, part: type) -> Any:
    cls: Any = _subclass(base, part)
    return cls.__new__(cls)


@functools.cache
def _calls_sdpa(cls: type) -> bool:
    """Whether a method of this class, or a function of its module that a method calls, names the function."""
    if cls.__module__.partition(".")[0] == "torch":
        return False
    return any(SDPA in code.co_names for code in _code(cls))


def _code(cls: type) -> Iterator[CodeType]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for method in vars(base).values():
            function = inspect.unwrap(method) if callable(method) else method
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            yield code
            named = (function.__globals__.get(name) for name in code.co_names)
            yield from (other.__code__ for other in named if inspect.isfunction(other))
