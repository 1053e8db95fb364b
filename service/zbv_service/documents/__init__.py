"""TODO: say what documents is for."""
