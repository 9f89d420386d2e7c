"""Attention layers: any operator, self- and cross-attention, learned-query pooling, grids of any dimension."""

from headwise.nn.attention_layer import AttentionLayer, Builder
from headwise.nn.builders import LearnedBlocks, LearnedConvolution, LearnedProjection
from headwise.nn.drop_in import DropIn, masks_from_torch
from headwise.nn.embeddings import PatchEmbedding, frames
from headwise.nn.encoder import Encoder
from headwise.nn.grid import GridAttention
from headwise.nn.learned_query import LearnedQuery
from headwise.nn.linformer import ShortenedAttention
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices
from headwise.nn.recurrent import Recurrent
from headwise.nn.reversible import Reversible

__all__ = [
    "AttentionLayer",
    "Builder",
    "DropIn",
    "Encoder",
    "GridAttention",
    "LearnedBlocks",
    "LearnedConvolution",
    "LearnedProjection",
    "LearnedQuery",
    "MultiHead",
    "PatchEmbedding",
    "Recurrent",
    "Reversible",
    "ShortenedAttention",
    "frames",
    "head_slices",
    "masks_from_torch",
]
