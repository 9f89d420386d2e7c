"""Models of transformers that headwise changes: classes, files and inputs of them."""
