"""Commands about the query/key widths of heads."""
