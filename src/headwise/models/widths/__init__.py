"""Other query/key widths for the heads of models that call transformers' attention interface."""
