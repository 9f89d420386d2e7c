"""Attention layers for any operator: self- and cross-attention, learned-query pooling, grids, encoders."""

from headwise.nn.attention_layer import AttentionLayer, Builder
from headwise.nn.builders import LearnedBlocks, LearnedConvolution, LearnedProjection
from headwise.nn.drop_in import DropIn, masks_from_torch
from headwise.nn.embeddings import PatchEmbedding, frame_embedding
from headwise.nn.encoder import Encoder
from headwise.nn.grid import GridAttention
from headwise.nn.learned_query import LearnedQuery
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices
from headwise.nn.recurrent import Recurrent
from headwise.nn.relative_attention import (
    ConvolutionGeometry,
    QuadraticAttention,
    RelativeAttention,
    SeparableQuadraticAttention,
    ShiftAttention,
)
from headwise.nn.reversible import Reversible

__all__ = [
    "AttentionLayer",
    "Builder",
    "ConvolutionGeometry",
    "DropIn",
    "Encoder",
    "GridAttention",
    "LearnedBlocks",
    "LearnedConvolution",
    "LearnedProjection",
    "LearnedQuery",
    "LinformerAttention",
    "MultiHead",
    "PatchEmbedding",
    "QuadraticAttention",
    "Recurrent",
    "RelativeAttention",
    "Reversible",
    "SeparableQuadraticAttention",
    "ShiftAttention",
    "frame_embedding",
    "head_slices",
    "masks_from_torch",
]
