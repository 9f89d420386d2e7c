"""Attention by relative position: shifts, offsets, Toeplitz matrices, separable and quadratic scores."""
