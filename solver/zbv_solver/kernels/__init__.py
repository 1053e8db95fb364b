"""TODO: say what kernels is for."""
