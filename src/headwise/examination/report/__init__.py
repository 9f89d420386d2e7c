"""Turn an `Examination` into one HTML page, figures and an excerpt of the attention maps."""
