"""TODO: say what executors is for."""
