"""Batches of images and recordings, with a name for each position of the sequence that a model makes of them."""
