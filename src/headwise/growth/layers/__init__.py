"""The attention layers that grow: what passes through them, and their weights."""
