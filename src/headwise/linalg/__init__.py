"""Linear algebra of matrices known by what they do: spectra, ranks, norms and sketches."""
