"""y = sum_h P_h X W_h + b, P_h = softmax(S_h): attention on maps by content and relative position, in 1-D to 3-D.

    S_qk = [ a_q . c_k + a_q . r_d + u . c_k ] / sqrt(k) + s_d,     a = X W_q,  c = X W_k,  r_d = e_d W~_k,  d = k - q

The four terms of Dai et al. 2019: content with content, content of the query with the place of the key, content of the
key for any query, and place alone.  `position_encodings` give r_d and s_d; absolute ones are added to X in a and c.

Without content S_qk = s_d, which with quadratic encodings is the case of Cordonnier, Loukas & Jaggi 2020, whose sharp
limit is a convolution; P is then a Kronecker product (`quadratic`) and no score is formed.  With content the scores of
all pairs are, b h m n numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from headwise.cost import Cost
from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.kernel_attention import ConvolutionGeometry, MapAttention
from headwise.nn.position_encodings import Encoding, QuadraticEncoding
from headwise.operators.base import AttentionOperator
from headwise.operators.relative.encodings import differences
from headwise.operators.relative.quadratic import log_width, quadratic
from headwise.operators.softmax import softmax
from headwise.random_state import kept_random_state
from headwise.shapes import are_tensors, shown, truth_values, whole_numbers


@final
class RelativeAttention(MapAttention):
    """`layer(x)` with x (b, width, *grid) -> (b, out_width, *grid), with one W_h (out_width x width) for each head.

    axes        of the maps, 1 to 3
    encoding    `QuadraticEncoding`, `SinusoidalEncoding`, `partial(LearnedEncoding, grid=...)`, `AbsoluteEncoding`, ...
    content     False leaves s_d alone: P depends on places only
    key_width   k of every head
    geometry    where queries and keys are; by default both at every cell of the map.  That of a convolution pads the
                keys and strides the queries (`from_kernel`); a query has the content of the middle of its kernel.

    >>> layer = RelativeAttention(8, 4)
    >>> layer(torch.randn(2, 8, 5, 6)).shape, layer.operator(torch.randn(2, 8, 5, 6)).shape
    (torch.Size([2, 8, 5, 6]), torch.Size([2, 4, 30, 30]))
    >>> RelativeAttention(8, 4, content=False).operator(torch.randn(2, 8, 5, 6)).shape  # the same for all inputs
    torch.Size([4, 30, 30])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        axes: int = 2,
        encoding: Encoding = QuadraticEncoding,
        content: bool = True,
        key_width: int = 16,
        out_width: int | None = None,
        bias: bool = True,
        geometry: ConvolutionGeometry | None = None,
    ) -> None:
        name = type(self).__name__
        out_width = width if out_width is None else out_width
        whole_numbers(name, width=width, heads=heads, key_width=key_width, out_width=out_width)
        whole_numbers(name, most=3, axes=axes)
        truth_values(name, content=content, bias=bias)
        if not callable(encoding):
            raise InputError(f"{name}: encoding must be a class such as QuadraticEncoding, but is {shown(encoding)}")
        one = (1,) * axes
        plain = ConvolutionGeometry(width, one, one, one, ((0, 0),) * axes)
        geometry = plain if geometry is None else geometry
        bound = 1 / math.sqrt(width // geometry.groups * heads)
        weight = torch.empty(out_width, width // geometry.groups, heads).uniform_(-bound, bound)
        super().__init__(geometry, weight, torch.zeros(out_width) if bias else None, (heads,))
        self.heads, self.key_width, self.content, self._plain = heads, key_width, content, geometry == plain
        self.encoding = encoding(heads, axes, key_width, width, content)
        self.query = nn.Linear(width, heads * key_width, bias=False) if content else None
        self.key = nn.Linear(width, heads * key_width, bias=False) if content else None
        self.u = nn.Parameter(0.1 * torch.randn(heads, key_width)) if content else None

    @classmethod
    def from_kernel(
        cls, geometry: ConvolutionGeometry, weight: Tensor, bias: Tensor | None, *, alpha: float, key_width: int = 16
    ) -> Self:
        """A layer that starts as a convolution: quadratic heads at the kernel cells, of sharpness alpha, W_q = W_k = 0.

        u and W~_k are not zero, so that W_q and W_k have gradients and the heads can learn to look at content.
        """
        with kept_random_state():  # a conversion does not change the caller's random state
            layer = cls(
                geometry.in_channels,
                geometry.heads,
                axes=geometry.axes,
                key_width=key_width,
                out_width=weight.shape[0],
                bias=bias is not None,
                geometry=geometry,
            ).to(weight)
        sides = zip(geometry.kernel_size, geometry.dilation, strict=True)
        centres = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) * d for k, d in sides))
        with torch.no_grad():
            layer.weight.copy_(weight.flatten(2))
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
            for projection in (layer.query, layer.key):
                if projection is not None:
                    projection.weight.zero_()
            places = layer.encoding
            assert isinstance(places, QuadraticEncoding)
            places.centres.copy_(centres.reshape(geometry.heads, -1))
            places.log_widths.copy_(log_width(alpha).expand_as(places.log_widths))
        return layer

    def attention_on(self, x: Tensor) -> AttentionOperator:
        return self.operator(x)

    def operator(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> AttentionOperator:
        """P (b, h, m, n), without content (h, m, n); cells are numbered in row-major order, those of the keys padded.

        causal     a cell attends to itself and to those before it
        key_mask   boolean (b, *grid), True = attend.  Both need the default geometry.
        """
        g = self.geometry
        g.check_input("RelativeAttention", x, self.weight)
        x = x if x.dim() == g.axes + 2 else x.unsqueeze(0)
        grid = tuple(x.shape[2:])
        padded, queries, masks = g.padded_size(grid), g.output_size(grid), self._masks(x, causal, key_mask)
        if not self.content and isinstance(self.encoding, QuadraticEncoding):
            where = {} if self._plain else {"queries": queries, "stride": g.stride}
            return quadratic(padded, self.encoding.centres, self.encoding.log_widths, **where, **masks)
        offsets, index = (y.to(x.device) for y in differences(padded, queries, g.stride))
        reach = [max(side - 1, s * (q - 1)) for side, s, q in zip(padded, g.stride, queries, strict=True)]
        r, s = self.encoding.terms(offsets, reach)
        if self.query is None or self.key is None or self.u is None:
            if s is None:
                raise InputError(f"RelativeAttention: without content, {type(self.encoding).__name__} needs an s_d")
            batch = () if key_mask is None else (x.shape[0],)
            q, k = (s.new_zeros(*batch, self.heads, cells, 1) for cells in index.shape)
            return softmax(q, k, attn_bias=s[:, index], **masks)
        rows = g.pad(x).flatten(2).mT  # (b, n, channels)
        shared = self.encoding.shared(padded, rows)
        rows = rows if shared is None else rows + shared
        c = self._split(self.key(rows))
        a = self._split(self.query(rows[:, self._query_cells(padded, queries, x.device)]))
        bias = None
        if r is not None and s is not None:
            # one product for both terms, before the differences are spread over the pairs
            scaled = torch.nn.functional.pad(a / math.sqrt(self.key_width), (0, 1), value=1.0)
            by_difference = scaled @ torch.cat([r, s.unsqueeze(-1)], dim=-1).mT.to(a.dtype)  # (b, h, m, t)
            bias = by_difference.gather(-1, index.expand(*by_difference.shape[:-2], *index.shape))
        return softmax(a + self.u.unsqueeze(-2).to(a.dtype), c, attn_bias=bias, **masks)

    def forward(self, x: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """(b, width, *grid) -> (b, out_width, *queries); the batch axis may be missing.  Masks as in `operator`."""
        self.geometry.check_input("RelativeAttention", x, self.weight)
        return self._batched(lambda y: self._weighted(self.operator(y, causal=causal, key_mask=key_mask), y), x)

    def cost(self, grid: Sequence[int]) -> Cost:
        """Of one map: projections, encodings, scores, weighted sums, and the products with W_h."""
        g, h, k = self.geometry, self.heads, self.key_width
        padded, queries = g.padded_size(grid), g.output_size(grid)
        m, n = math.prod(queries), math.prod(padded)
        mixing = Cost(m * self.weight.numel())
        if not self.content:
            like = self.weight.new_zeros(1, g.in_channels, *grid)
            return self.operator(like).cost(g.in_channels) + self._encoding_cost(padded, queries) + mixing
        scores = Cost((m + n) * g.in_channels * h * k + 2 * h * m * n * max(k, g.in_channels), h * m * n)
        return scores + self._encoding_cost(padded, queries) + mixing

    def _encoding_cost(self, padded: Sequence[int], queries: Sequence[int]) -> Cost:
        """r_d = e_d W~_k, s_d = v . r_d and a . r_d + s_d, for all t differences d."""
        weight = getattr(self.encoding, "weight", None)
        if weight is None:
            return Cost(0)
        g, h, k = self.geometry, self.heads, self.key_width
        t = math.prod([side + s * (q - 1) for side, s, q in zip(padded, g.stride, queries, strict=True)])
        work = t * weight.shape[-2] * h * k + (0 if isinstance(self.encoding, QuadraticEncoding) else t * h * k)
        return Cost(work + (h * math.prod(queries) * t * (k + 1) if self.content else 0), h * t * k)

    def _split(self, y: Tensor) -> Tensor:
        """(b, n, h k) -> (b, h, n, k)"""
        return y.unflatten(-1, (self.heads, self.key_width)).transpose(-3, -2)

    def _query_cells(self, padded: Sequence[int], queries: Sequence[int], device: torch.device) -> Tensor | slice:
        """The cell of the padded map whose content a query has: the middle of its kernel."""
        g = self.geometry
        if self._plain:
            return slice(None)
        index = torch.zeros((), dtype=torch.int64, device=device)
        for side, q, stride, reach in zip(padded, queries, g.stride, g.reach, strict=True):
            index = index.unsqueeze(-1) * side + torch.arange(q, device=device) * stride + reach // 2
        return index.flatten()

    def _masks(self, x: Tensor, causal: bool, key_mask: Tensor | None) -> dict[str, Any]:
        truth_values("RelativeAttention", causal=causal)
        if not causal and key_mask is None:
            return {}
        if not self._plain:
            raise UnsupportedError(
                "RelativeAttention: masks need queries and keys at the cells of the map, but this layer has the "
                "kernel, padding or stride of a convolution; make one without geometry"
            )
        masks: dict[str, Any] = {"causal": True} if causal else {}
        if key_mask is not None:
            are_tensors("RelativeAttention", key_mask=key_mask)
            expected = (x.shape[0], *x.shape[2:])
            if tuple(key_mask.shape) != expected:
                raise ShapeError(
                    f"RelativeAttention: key_mask has shape {tuple(key_mask.shape)}, but x has (b, *grid) = {expected}"
                )
            masks["key_mask"] = key_mask.flatten(1).unsqueeze(1)
        return masks

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, key_width={self.key_width}, content={self.content}"
