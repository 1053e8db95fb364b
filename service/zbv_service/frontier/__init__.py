"""TODO: say what frontier is for."""
