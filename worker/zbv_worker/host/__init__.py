"""TODO: say what host is for."""
