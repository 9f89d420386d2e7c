"""Softmax over a subset of the keys: windows, the patterns of the Sparse Transformer, hashing."""
