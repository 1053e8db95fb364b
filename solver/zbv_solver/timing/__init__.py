"""TODO: say what timing is for."""
