"""TODO: say what demo is for."""
