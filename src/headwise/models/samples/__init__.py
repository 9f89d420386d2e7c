"""Models that come as Python packages, so that they can be named and installed like any other."""
