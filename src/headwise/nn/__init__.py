"""Attention layers: any operator, self- and cross-attention, learned-query pooling, grids of any dimension."""

from headwise.nn.convert import DropIn, masks_from_torch
from headwise.nn.grid import GridAttention
from headwise.nn.heads import head_slices
from headwise.nn.layer import AttentionLayer, Builder
from headwise.nn.learned_query import LearnedQuery
from headwise.nn.multihead import MultiHead

__all__ = [
    "AttentionLayer",
    "Builder",
    "DropIn",
    "GridAttention",
    "LearnedQuery",
    "MultiHead",
    "head_slices",
    "masks_from_torch",
]
