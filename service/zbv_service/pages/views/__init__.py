"""TODO: say what views is for."""
