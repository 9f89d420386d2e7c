"""The compiled kernels: how they are built and loaded, and each of them against torch and float64."""
