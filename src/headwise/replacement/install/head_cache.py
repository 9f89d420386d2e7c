"""A transformers cache in which every key head keeps what its query heads still read (see `kept_keys`).

`generate` of a rewritten model makes one.  In a loop of your own, or for a conversation:

    cache = HeadCache(model)
    output = model(**batch, past_key_values=cache)
    cache.nbytes

Where the original attention runs, `update` returns all keys, as other caches do.  Elsewhere it stores nothing: it marks
the new keys with their layer, and the attention function, which knows the mask, hands them to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from headwise.errors import UnsupportedError
from headwise.operators.masks import Mask
from headwise.replacement.install.kept_keys import LayerPast, NewKeys
from headwise.replacement.install.mixed_heads import MixedHeads, is_padding_or_causal
from headwise.replacement.install.transformers_attention import MARK, NAME

LARGEST_CROP = 128
"""Tokens that can be taken back after `activate_past_recording`."""


class HeadCacheLayer(CacheLayerMixin):
    """The past of one layer."""

    supports_early_init = False

    def __init__(self, heads: MixedHeads, *, keep_all: bool = False) -> None:
        super().__init__()
        self.past = LayerPast(heads, keep_all=keep_all)
        self.record_past = False
        self._marked = False

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return self.past.keep_all or self.record_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._marked:
            raise UnsupportedError(
                "HeadCache: the keys of the last call did not reach the attention function; this model changes keys "
                "after it has cached them, so pass past_key_values=DynamicCache(config=model.config)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (every := self.past.extended(key_states, value_states)) is not None:
            return every
        key_states = key_states.view_as(key_states)  # a tensor of our own to mark
        setattr(key_states, MARK, self)
        self._marked = True
        return key_states, value_states

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, original: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """P v (b, h, m, d) of new queries; `original(k, v)` is the attention of q in the model as it was."""
        self._marked = False
        if not (is_padding_or_causal(mask) and mask.causal):
            raise UnsupportedError(
                f"HeadCache: a mask (m = {mask.m}, n = {mask.n}) that is neither padding nor causal; pass a mask (b, n)"
            )
        keep = None if mask.key_mask is None else mask.key_mask[:, 0].expand(len(q), -1)
        first = None if keep is None else keep.int().argmax(-1)
        return self.past.attend(q, k, v, NewKeys(self.past.count, mask.n, scale, keep, first), original)

    def get_seq_length(self) -> int:
        return self.past.count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.past.count + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """In a cache that is still empty: keep some more keys, so that `crop` can take back up to 128 tokens."""
        if not self.past.count:
            self.record_past, self.past.spare = True, LARGEST_CROP

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, but got {tokens_to_remove}")
        if tokens_to_remove:
            self.past.crop(max(0, self.past.count + tokens_to_remove))

    def reset(self) -> None:
        past = self.past
        self.past = LayerPast(past.heads, keep_all=past.keep_all, spare=past.spare)
        self.is_initialized = self._marked = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.past.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.past.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.past.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        raise UnsupportedError('HeadCache: cannot be offloaded; use cache_implementation="offloaded" of generate')

    def prefetch(self) -> None:
        self.offload()


class HeadCache(Cache):
    """The cache of a rewritten model; other layers of the model (sliding windows, states) are cached as usual.

    keep_all   keep all keys of all heads, so that any number of tokens can be cropped
    """

    def __init__(self, model: nn.Module, *, keep_all: bool = False) -> None:
        config: Any = model.config
        layers: list[Any] = list(DynamicCache(config=config).layers)
        others_read = getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
        for index, heads in causal_heads(model).items():
            if index < len(layers) and type(layers[index]) is DynamicLayer and not others_read:
                layers[index] = HeadCacheLayer(heads, keep_all=keep_all)
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all layers hold."""
        return cache_bytes(self)

    def __repr__(self) -> str:
        return f"HeadCache({len(self)} layers, {self.get_seq_length()} positions, {self.nbytes:,} bytes)"


def causal_heads(model: nn.Module) -> dict[int, MixedHeads]:
    """{index of a layer: the MixedHeads of its causal attention}"""
    found = {}
    for module in model.modules():
        heads, index = getattr(module, NAME, None), getattr(module, "layer_idx", None)
        if isinstance(heads, MixedHeads) and isinstance(index, int) and getattr(module, "is_causal", True):
            found[index] = heads
    return found


def cache_bytes(cache: Any) -> int:
    """Bytes of memory that the layers of any cache of transformers hold."""
    tensors = []
    for layer in cache.layers:
        own = layer.past.tensors if isinstance(layer, HeadCacheLayer) else vars(layer).values()
        tensors += [x for x in own if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
