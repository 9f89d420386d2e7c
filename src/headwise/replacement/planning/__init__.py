"""Find the cheapest operator for every head within a tolerance."""
