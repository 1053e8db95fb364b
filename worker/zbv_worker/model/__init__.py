"""TODO: say what model is for."""
