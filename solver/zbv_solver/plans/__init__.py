"""TODO: say what plans is for."""
