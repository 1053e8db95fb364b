"""TODO: say what commands is for."""
