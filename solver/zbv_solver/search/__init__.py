"""TODO: say what search is for."""
