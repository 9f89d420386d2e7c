"""Attention layers for any operator: self- and cross-attention, learned-query pooling, grids, encoders."""

from headwise.nn.attention_layer import AttentionLayer, Builder
from headwise.nn.builders import LearnedBlocks, LearnedConvolution, LearnedProjection, LearnedSimilarity
from headwise.nn.drop_in import DropIn, masks_from_torch, stock_state_dict
from headwise.nn.embeddings import PatchEmbedding, frame_embedding
from headwise.nn.encoder import Encoder
from headwise.nn.grid import GridAttention
from headwise.nn.initialisation import impulse_, mimetic_
from headwise.nn.kernel_attention import (
    ConvolutionGeometry,
    KernelAttention,
    MapAttention,
    QuadraticAttention,
    SeparableQuadraticAttention,
    ShiftAttention,
)
from headwise.nn.learned_query import LearnedQuery
from headwise.nn.linformer_attention import LinformerAttention
from headwise.nn.multihead import MultiHead
from headwise.nn.position_encodings import (
    AbsoluteEncoding,
    LearnedEncoding,
    PositionEncoding,
    QuadraticEncoding,
    SinusoidalEncoding,
)
from headwise.nn.ragged_heads import head_slices
from headwise.nn.recurrent import Recurrent
from headwise.nn.relative_attention import RelativeAttention
from headwise.nn.reversible import Reversible

__all__ = [
    "AbsoluteEncoding",
    "AttentionLayer",
    "Builder",
    "ConvolutionGeometry",
    "DropIn",
    "Encoder",
    "GridAttention",
    "KernelAttention",
    "LearnedBlocks",
    "LearnedConvolution",
    "LearnedEncoding",
    "LearnedProjection",
    "LearnedQuery",
    "LearnedSimilarity",
    "LinformerAttention",
    "MapAttention",
    "MultiHead",
    "PatchEmbedding",
    "PositionEncoding",
    "QuadraticAttention",
    "QuadraticEncoding",
    "Recurrent",
    "RelativeAttention",
    "Reversible",
    "SeparableQuadraticAttention",
    "ShiftAttention",
    "SinusoidalEncoding",
    "frame_embedding",
    "head_slices",
    "impulse_",
    "masks_from_torch",
    "mimetic_",
    "stock_state_dict",
]
