"""Weight that heads give to repeated tokens and to delimiters, without forming P.

With t_i the token at position i, the keys of query i that belong to a pattern are, where the mask allows them,

    duplicate               j != i  with t_j     = t_i      the same token elsewhere
    induction               j <= i  with t_(j-1) = t_i      what followed the token earlier (Olsson et al. 2022)
    previous of duplicate   j < i-1 with t_(j+1) = t_i      what preceded the token earlier

The mass of a pattern is the mean of sum_j P_ij over the queries that have such a key: the others cannot show whether
the head follows the pattern, and usually rest on a sink.  Its chance level is the same number for a head that averages
over all visible keys.

All pairs come from places of equal tokens, sum_t count_t^2 of them, a few per cent of n^2 in real text.  For these
P_ij = exp(S_ij - log_sum_exp_i) is computed: by the compiled kernel `token_patterns` where it is usable, otherwise
places of one token as one small matrix product, in chunks of bounded size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.models.intercept import AttentionCall
from headwise.operators._kernels import limits
from headwise.operators._kernels.native.head_statistics import token_patterns
from headwise.operators._kernels.scores import Scores
from headwise.shapes import filled

PATTERNS = {"duplicate": 0, "induction": 1, "previous_of_duplicate": -1}
"""pattern -> the key's distance from another place of the query's token"""


@dataclass(frozen=True, eq=False)
class TokenWeights:
    """Weight of each pattern and its chance level, (h,) each; NaN if no query has such a key.  Input of measures."""

    mass: Mapping[str, Tensor]
    chance: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class DelimiterWeights:
    """Weight that delimiters receive and its chance level, (h,) each.  Input of measures."""

    mass: Tensor
    chance: Tensor


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Queries and keys of the three patterns, for some places of some tokens."""

    i: Tensor  # (tokens, rows), 0 where filled
    real: Tensor  # (tokens, rows), False where filled
    j: Tensor  # (tokens, 3 width), 0 where there is no such key
    hidden: Tensor  # (tokens, rows, 3 width), True where the pair does not belong to the pattern, or is not causal

    @classmethod
    def of(cls, e: Tensor, rows: int, n: int, ahead: int | None) -> Iterator[_Pairs]:
        """The pairs of e (tokens, width), places of the same token, -1 where filled: some rows at a time."""
        shifted = torch.stack([e + shift for shift in PATTERNS.values()], dim=-2)
        exists = ((shifted >= 0) & (shifted < n) & (e >= 0).unsqueeze(-2)).flatten(1).unsqueeze(-2)
        other, j = e.unsqueeze(-2), shifted.flatten(1).clamp(0, n - 1)
        for i in e.split(rows, dim=-1):
            query = i.unsqueeze(-1)
            earlier = other < query
            valid = torch.cat([other != query, earlier, earlier], dim=-1) & exists & (query >= 0)
            if ahead is not None:
                valid &= j.unsqueeze(-2) <= query + ahead
            yield cls(i.clamp(min=0), i >= 0, j, ~valid)


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """The tokens of one text: their ids, the places of those that occur more than once, and which are delimiters."""

    ids: Tensor  # (n,)
    order: Tensor  # places of tokens that occur more than once, ascending for each token
    starts: Tensor  # (tokens + 1,) where those of each token begin in `order`, and its length
    delimiters: Tensor | None  # (n,) boolean; None if the strings are not known

    @classmethod
    def of(cls, ids: Tensor, delimiters: Tensor | None = None) -> TokenPlaces:
        """
        >>> places = TokenPlaces.of(torch.tensor([5, 7, 5, 5, 7, 9]))
        >>> places.order.tolist(), places.starts.tolist()
        ([0, 2, 3, 1, 4], [0, 3, 5])
        """
        _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        order, more = inverse.argsort(stable=True), counts > 1
        starts = torch.nn.functional.pad(counts[more].cumsum(0), (1, 0))
        return cls(ids, order[more[inverse[order]]], starts, delimiters)

    @functools.cached_property
    def repeated(self) -> tuple[Tensor, ...]:
        """(tokens, width) places, filled with -1; one tensor a power of two.

        >>> TokenPlaces.of(torch.tensor([5, 7, 5, 5, 7])).repeated
        (tensor([[1, 4]]), tensor([[ 0,  2,  3, -1]]))
        """
        by_width: dict[int, list[Tensor]] = {}
        for places in self.order.tensor_split(self.starts[1:-1].cpu()):
            width = 1 << (len(places) - 1).bit_length()
            if len(places):
                by_width.setdefault(width, []).append(filled(places, (0, width - len(places)), value=-1))
        return tuple(torch.stack(by_width[width]) for width in sorted(by_width))

    def pairs(self, entries: int, ahead: int | None) -> Iterator[_Pairs]:
        """All pairs, in parts of at most `entries`, and of one row at least; `ahead` if causal."""
        for group in self.repeated:
            width = group.shape[-1]
            for e in group.split(max(1, entries // (width * width))):
                yield from _Pairs.of(e, max(1, entries // width), len(self.ids), ahead)


class BatchTokens:
    """The tokens of a batch, for the attention calls whose keys they are."""

    def __init__(self, batch: Any, names: Sequence[Sequence[str]] | None = None) -> None:
        self.ids = {name: x for name, x in token_ids(batch).items() if x.dim() == 2}
        self.names = names
        self._places: dict[tuple[int, ...], TokenPlaces] = {}

    def places(self, call: AttentionCall, b: int, scores: Scores) -> TokenPlaces | None:
        """The tokens of sequence b, less padding, if queries and keys are these tokens.

        `scores` are those of the sequence without padding, as `observe.sequence` makes them.
        """
        decoder = "decoder" in call.site and "decoder_input_ids" in self.ids
        ids = self.ids.get("decoder_input_ids" if decoder else "input_ids")
        _, m, n = scores.shape
        if ids is None or call.kind != "self" or ids.shape != (len(call.k), call.k.shape[-2]) or m != n:
            return None
        row, kept = ids[b], call.mask.index(b).attended_keys()
        row = row if kept is None else row[kept]
        if len(row) != n:
            return None
        key = (decoder, b, *row.tolist())
        if key not in self._places:
            delimiters = self._delimiters(ids, b)
            cut = delimiters if delimiters is None or kept is None else delimiters[kept]
            self._places[key] = TokenPlaces.of(row, cut)
        return self._places[key]

    def _delimiters(self, ids: Tensor, b: int) -> Tensor | None:
        """Which tokens of sequence b are delimiters; None if their names, those of input_ids, are not known."""
        if self.names is None or len(self.names[b]) != ids.shape[1]:
            return None
        same = torch.equal(ids, self.ids["input_ids"])
        return delimiter_tokens(self.names[b]).to(ids.device) if same else None


def token_weights(
    scores: Scores,
    log_sum_exp: Tensor,
    places: TokenPlaces,
    *,
    second_half: bool = False,
    entries: int = limits.CACHE_ENTRIES,
) -> TokenWeights:
    """Weight of every pattern: q (h, n, k), k (h, n, k), log_sum_exp (h, n); at most about `entries` scores at once.

    second_half  mean over the queries of the second half only, among those that have such a key
    """
    h, _, n = scores.shape
    found = token_patterns(scores, log_sum_exp, places.order, places.starts)
    mass, keys = _by_products(scores, log_sum_exp, places, entries) if found is None else (found[0], found[1][None])
    visible = scores.mask.counts().clamp(min=1)
    if second_half:
        mass, keys, visible = mass[..., n // 2 :], keys[..., n // 2 :], visible[..., n // 2 :]
    queries = (keys > 0).sum(-1).double()
    means = (mass.double().sum(-1) / queries, (keys / visible.unsqueeze(-2)).double().sum(-1) / queries)
    means = tuple(mean.expand(h, 3) for mean in means)
    return TokenWeights(*({name: mean[:, at] for at, name in enumerate(PATTERNS)} for mean in means))


def _by_products(scores: Scores, log_sum_exp: Tensor, places: TokenPlaces, entries: int) -> tuple[Tensor, Tensor]:
    """Sums (h, 3, n) of the weights and numbers (h or 1, 3, n) of the keys of each pattern, by matrix products."""
    h, _, n = scores.shape
    q, k, mask = scores.q.float() * scores.scale, scores.k.float(), scores.mask
    masks = 1 if mask.visible is None or mask.visible.dim() < 3 else h  # heads that share what is hidden are one
    mass, keys = log_sum_exp.new_zeros(h, 3, n), log_sum_exp.new_zeros(masks, 3, n)
    j, chosen = None, k
    for pairs in places.pairs(entries // (3 * h), mask.ahead):
        i, width = pairs.i, pairs.j.shape[-1] // 3
        if pairs.j is not j:
            j, chosen = pairs.j, k[:, pairs.j].mT
        s = q[:, i] @ chosen  # (h, tokens, rows, 3 width)
        if mask.attn_bias is not None:
            s = s + _at(mask.attn_bias, pairs).float()
        hidden = pairs.hidden if mask.visible is None else pairs.hidden | ~_at(mask.visible, pairs)
        p = s.sub_(log_sum_exp[:, i].unsqueeze(-1)).exp_().masked_fill_(hidden, 0)
        place, real = i[pairs.real], pairs.real
        mass[..., place] = p.unflatten(-1, (3, width)).sum(-1)[:, real].mT
        count = width - hidden.unflatten(-1, (3, width)).sum(-1)
        keys[..., place] = count.float().expand(masks, *i.shape, 3)[:, real].mT
    return mass, keys


def delimiter_weights(scores: Scores, received: Tensor, places: TokenPlaces) -> DelimiterWeights | None:
    """sum of c_j over delimiters j, from c (h, n), and the same for a head that averages over all visible keys."""
    if places.delimiters is None:
        return None
    mask, delimiters = scores.mask, places.delimiters
    shown = delimiters if mask.key_mask is None else mask.key_mask & delimiters
    share = replace(mask, key_mask=shown).counts() / mask.counts().clamp(min=1)
    mean = share.double().mean(-1)
    return DelimiterWeights(received.double()[:, delimiters].sum(-1), mean.expand(len(received)))


def delimiter_tokens(names: Sequence[str]) -> Tensor:
    """Which tokens are special ones, punctuation, newlines or other white space: (n,) boolean.

    >>> delimiter_tokens(["[CLS]", "call", "me", "##y", ".", "Ġ,", "Ċ", "<|endoftext|>", "<"]).int().tolist()
    [1, 0, 0, 0, 1, 1, 1, 1, 1]
    """
    byte_level = any(mark in name for name in names for mark in "ĠĊ")
    return torch.tensor([_is_delimiter(name, byte_level) for name in names], dtype=torch.bool)


@functools.lru_cache(maxsize=1 << 16)
def _is_delimiter(name: str, byte_level: bool) -> bool:
    bracketed = len(name) > 2 and (name[0], name[-1]) in (("[", "]"), ("<", ">"))
    if bracketed and not name.startswith("<0x"):
        return True
    if name.startswith("<0x"):  # a byte of a sentencepiece vocabulary
        return name == "<0x0A>"
    text = _decoded(name) if byte_level else name
    return not any(character.isalnum() for character in text)


def _decoded(name: str) -> str:
    """The text of a token of a byte-level vocabulary, in which each byte is written as one printable character."""
    return bytes(_BYTES[c] for c in name if c in _BYTES).decode("utf-8", errors="replace").replace("\ufffd", "x")


def _byte_characters() -> dict[str, int]:
    """character -> byte: printable Latin-1 characters stand for themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()


def _at(x: Tensor, pairs: _Pairs) -> Tensor:
    """x (…, m or 1, n) at the pairs: (…, tokens, rows, 3 width)."""
    return x[..., pairs.i.unsqueeze(-1) if x.shape[-2] > 1 else 0, pairs.j.unsqueeze(-2)]


def token_ids(batch: Any) -> dict[str, Tensor]:
    """The token ids of a batch by name; empty for images, features and embeddings."""
    if isinstance(batch, Mapping):
        named = {name: batch.get(name) for name in ("input_ids", "decoder_input_ids")}
    else:
        only = batch if isinstance(batch, Tensor) else batch[0] if len(batch) == 1 else None
        named = {"input_ids": only}
    return {
        name: x
        for name, x in named.items()
        if isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
    }


TokenNames = Callable[[Any], list[list[str]]]
"""batch -> the strings of the tokens of each of its sequences"""
