"""TODO: say what frontiers is for."""
