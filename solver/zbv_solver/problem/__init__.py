"""TODO: say what problem is for."""
