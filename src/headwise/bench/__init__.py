"""Cost as a function of n, fitted exponents, peers in the same run, and distance from exact attention."""
