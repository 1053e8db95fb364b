"""TODO: say what problems is for."""
