"""Measure every head while the model runs, and what depth does to its tokens."""
