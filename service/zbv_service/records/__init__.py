"""TODO: say what records is for."""
