"""TODO: say what measured is for."""
