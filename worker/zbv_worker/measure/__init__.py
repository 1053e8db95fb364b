"""TODO: say what measure is for."""
