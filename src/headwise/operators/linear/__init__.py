"""Attention whose cost is linear in the sequence length: projections, feature maps, landmarks."""
