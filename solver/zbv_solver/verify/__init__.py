"""TODO: say what verify is for."""
