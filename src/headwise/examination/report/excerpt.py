"""Pictures of every head on one real text, small enough to be part of a page.

Two things are kept of the attention matrix P of a head:

    map     mean of P over cells, 8 bits a cell: round(255 sqrt(mean / largest mean of the head))
    links   every single weight above a threshold, 8 bits a weight: round(255 sqrt(weight))

Cell k of c cells over n positions covers floor(k n / c) … floor((k + 1) n / c) - 1.  A short text has a cell for every
pair of tokens, and needs no links.  A longer one has at most 64 x 64 cells, which show smaller weights by their mean,
and links for the strongest weights; the threshold is the lowest at which the links of all heads fit into LINK_BYTES.
The square root keeps small weights visible.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.examination.measure.observe import sequence
from headwise.models.intercept import AttentionCall, intercept, nothing_seen
from headwise.models.run import Batch, first_sequence, run_model, without_cache
from headwise.operators._kernels.scores import Scores
from headwise.operators.softmax import Softmax
from headwise.shapes import filled

MAP_BYTES = 300_000
"""Bytes for the maps of all heads, before base64, if there are links."""

LINK_BYTES = 700_000
"""Bytes for the links of all heads, before base64."""

SINGLE = 128
"""The largest number of tokens that can have a cell each."""

CELLS = 64
"""Cells a side of the finest map of a longer text."""

LINKED_QUERIES = 1024
"""Queries from the start of the text that may have links."""

BLOCK_ENTRIES = 1 << 20
"""Entries of P computed at a time."""

TokenNames = Callable[[Batch], list[list[str]]]


def make_excerpt(
    model: nn.Module, batch: Batch, token_names: TokenNames | None, *, own: bool = False
) -> dict[str, Any]:
    """Token names of the first sequence of the batch, and the maps and links of every head on it.

    own  the batch was chosen to be looked at, and is not the first of those that were examined
    """
    text = first_sequence(model, batch)
    sites: list[dict[str, Any]] = []
    means: list[Tensor] = []
    links = Links()

    def see(call: AttentionCall) -> None:
        scores, _ = sequence(call, 0)
        m, n = scores.shape[-2:]
        sites.append({"site": call.site, "kind": call.kind, "queries": m, "keys": n})
        means.append(cell_means(scores, SINGLE if max(m, n) <= SINGLE else CELLS, links))

    with torch.no_grad(), intercept(model, see):
        run_model(model, without_cache(model, text))
    if not sites:
        raise nothing_seen(model)
    names, decoder_names = _names(text, token_names)
    single = max(max(site["queries"], site["keys"]) for site in sites) <= SINGLE
    if single and sum(x.numel() for x in means) <= MAP_BYTES + LINK_BYTES:
        stored = None
    else:
        means, stored = coarser(means, sites), links.strongest()
    first_head = 0
    for site, mean in zip(sites, means, strict=True):
        image, top = to_bytes(mean)
        site.update(
            rows=image.shape[-2],
            columns=image.shape[-1],
            top=[float(f"{x:.4g}") for x in top.tolist()],
            maps=[_text(head) for head in image],
        )
        if stored is not None:
            site["links"] = [
                stored.encode(first_head + h, min(site["queries"], stored.queries)) for h in range(len(top))
            ]
        first_head += len(top)
        site.update(_site_names(site, names, decoder_names))
    for site in sites:
        del site["kind"]
    found: dict[str, Any] = {"tokens": names, "own": own, "sites": sites}
    if stored is not None:
        found.update(linked=stored.queries, threshold=float(f"{stored.threshold:.4g}"))
    return found


def cell_means(scores: Scores, cells: int = CELLS, links: Links | None = None) -> Tensor:
    """(h, rows, columns) means of P over at most `cells` x `cells` cells; its weights are added to `links`."""
    h, m, n = scores.shape[-3:]
    rows, columns = _cell_of(m, min(cells, m)), _cell_of(n, min(cells, n))
    sums = torch.zeros(h, min(cells, m), min(cells, n), dtype=torch.float32)
    if links is not None:
        links.next_site(h)
    for start, block in _blocks(scores):
        narrow = sums.new_zeros(h, block.shape[-2], sums.shape[-1]).index_add_(2, columns, block)
        sums.index_add_(1, rows[start : start + block.shape[-2]], narrow)
        if links is not None:
            links.add(block, start)
    return sums / rows.bincount()[:, None] / columns.bincount()


def coarser(means: list[Tensor], sites: list[dict[str, Any]], budget: int = MAP_BYTES) -> list[Tensor]:
    """At most CELLS cells a side, and half as many until all maps fit the budget."""
    cells = CELLS
    found = [_reduced(x, site, cells) for x, site in zip(means, sites, strict=True)]
    while sum(x.numel() for x in found) > budget and cells > 8:
        cells //= 2
        found = [_reduced(x, site, cells) for x, site in zip(found, sites, strict=True)]
    return found


def to_bytes(mean: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 maps (h, rows, columns) and the (h,) largest cell means."""
    top = mean.amax((-2, -1)).clamp(min=1e-30)
    return (mean / top[:, None, None]).sqrt().mul(255).round().to(torch.uint8), top


class Links:
    """The strongest weights of all heads, collected block by block; at most twice as many are held as can be kept."""

    def __init__(self, limit: int = LINK_BYTES) -> None:
        self.limit, self.queries, self.threshold = limit, LINKED_QUERIES, (0.5 / 255) ** 2  # weights that are not 0
        self.heads = self._first = self._held = self._seen = 0
        self._parts: list[tuple[Tensor, Tensor]] = []  # (4, links) int: head, query, key; weights

    def next_site(self, heads: int) -> None:
        self._first, self.heads = self.heads, self.heads + heads

    def add(self, block: Tensor, start: int) -> None:
        """Weights (h, rows, n) of the queries start, start + 1, …"""
        self._seen = max(self._seen, start + block.shape[-2])
        block = block[:, : max(0, self.queries - start)]
        for head, rows in enumerate(block, start=self._first):  # places take six times as much memory as weights
            strong = rows > self.threshold
            places = F.pad(strong.nonzero().int(), (1, 0), value=head)
            places[:, 1] += start
            self._parts.append((places, rows[strong]))
            self._held += len(places)
        if self._held > self.limit:
            self._keep(self.limit // 2)

    def strongest(self) -> Links:
        """These links, as many as fit the limit: a byte for each query, and two for each link or a little more."""
        self.queries = max(1, min(self.queries, self._seen, self.limit // (4 * max(1, self.heads))))
        self._choose(lambda places, _: places[:, 1] < self.queries)
        self._keep(int((self.limit - self.heads * self.queries) / 2.05))
        places, weights = (torch.cat(x) for x in zip(*self._parts, strict=True))
        order = ((places[:, 0].long() * self.queries + places[:, 1]) << 32 | places[:, 2]).argsort()
        self._parts = [(places[order], weights[order])]
        return self

    def encode(self, head: int, queries: int) -> dict[str, str]:
        """Of one head: number of links of each query, gaps between their keys (the first from key 0), and weights."""
        places, weights = self._parts[0]
        ends = torch.searchsorted(places[:, 0].contiguous(), torch.tensor([head, head + 1], dtype=torch.int32)).tolist()
        query, key = places[ends[0] : ends[1], 1].long(), places[ends[0] : ends[1], 2].long()
        gaps = torch.diff(key, prepend=key.new_zeros(1))
        first = torch.diff(query, prepend=query.new_full((1,), -1)) != 0
        return {
            "counts": _text(_numbers(query.bincount(minlength=queries))),
            "gaps": _text(_numbers(torch.where(first, key, gaps))),
            "weights": _text(weights[ends[0] : ends[1]].clamp(max=1).sqrt().mul(255).round().to(torch.uint8)),
        }

    def _keep(self, count: int) -> None:
        """Raise the threshold until at most `count` weights are above it."""
        weights = torch.cat([part for _, part in self._parts]).numpy()
        if (cut := len(weights) - count) > 0:
            weights.partition(cut - 1)  # in place; torch's kthvalue takes four times the memory
            self.threshold = float(weights[cut - 1])
            self._choose(lambda _, weights: weights > self.threshold)
        self._held = sum(len(part) for _, part in self._parts)

    def _choose(self, which: Callable[[Tensor, Tensor], Tensor]) -> None:
        for i, (places, weights) in enumerate(self._parts):
            kept = which(places, weights)
            self._parts[i] = places[kept], weights[kept]


def _blocks(scores: Scores) -> Iterator[tuple[int, Tensor]]:
    """(first query, float32 P (h, queries, n)) for successive blocks of queries, on the processor."""
    h, m, n = scores.shape[-3:]
    step = max(1, BLOCK_ENTRIES // (h * n))
    for start in range(0, m, step):
        block = Softmax(scores.rows(start, min(m, start + step))).dense().float().cpu()
        yield start, filled(block, (0, n - block.shape[-1]))  # keys after the last query of a causal block


def _edges(length: int, cells: int) -> Tensor:
    return torch.arange(cells + 1) * length // cells


def _cell_of(length: int, cells: int) -> Tensor:
    """The cell of each position."""
    return torch.bucketize(torch.arange(length), _edges(length, cells)[1:], right=True)


def _reduced(mean: Tensor, site: Mapping[str, Any], cells: int) -> Tensor:
    """The same means over fewer cells.  All edges of the coarser cells are edges of the finer ones."""
    h, rows, columns = mean.shape
    m, n = site["queries"], site["keys"]
    sizes = [_edges(m, rows).diff(), _edges(n, columns).diff()]
    few = [min(rows, cells), min(columns, cells)]
    groups = [
        torch.bucketize(_edges(length, old)[:-1], _edges(length, new)[1:], right=True)
        for length, old, new in ((m, rows, few[0]), (n, columns, few[1]))
    ]
    weighted = mean * sizes[0][:, None] * sizes[1]
    narrow = weighted.new_zeros(h, rows, few[1]).index_add_(2, groups[1], weighted)
    sums = weighted.new_zeros(h, *few).index_add_(1, groups[0], narrow)
    return sums / _edges(m, few[0]).diff()[:, None] / _edges(n, few[1]).diff()


def _numbers(x: Tensor) -> Tensor:
    """Numbers as bytes: 255 for each 255 in it, then the rest."""
    lengths = x // 255 + 1
    found = torch.full((int(lengths.sum()),), 255, dtype=torch.uint8)
    found[lengths.cumsum(0) - 1] = (x % 255).to(torch.uint8)
    return found


def _text(x: Tensor) -> str:
    return base64.b64encode(bytes(x.contiguous().flatten().tolist())).decode()


def _names(text: Batch, token_names: TokenNames | None) -> tuple[list[str], list[str] | None]:
    """Names of the positions of the text without padding, and of the decoder's; None if it has no decoder.

    The names of images and recordings say nothing about the tokens of a decoder.
    """
    names = [] if token_names is None else [str(x) for x in token_names(text)[0]]
    if not isinstance(text, Mapping):
        return names, None
    mask, ids = text.get("attention_mask"), text.get("decoder_input_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[-1] == len(names):
        names = [name for name, seen in zip(names, mask[0].tolist(), strict=True) if seen]
    if ids is None:
        return names, None
    if token_names is None or "input_ids" not in text:
        return names, []
    return names, [str(x) for x in token_names({"input_ids": ids})[0]]


def _site_names(site: Mapping[str, Any], names: list[str], of_decoder: list[str] | None) -> dict[str, list[str]]:
    """query_tokens and key_tokens of a site, empty where their number does not fit; nothing if both are `names`."""
    in_decoder = of_decoder is not None and (site["kind"] == "cross" or "decoder" in site["site"])
    queries = of_decoder or [] if in_decoder else names
    keys = of_decoder or [] if in_decoder and site["kind"] == "self" else names
    fit = len(queries) == site["queries"], len(keys) == site["keys"]
    if all(fit) and not in_decoder:
        return {}
    return {"query_tokens": queries if fit[0] else [], "key_tokens": keys if fit[1] else []}
