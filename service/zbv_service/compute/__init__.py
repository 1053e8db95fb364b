"""TODO: say what compute is for."""
