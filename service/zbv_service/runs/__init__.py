"""Training runs: what is asked, who takes part, what becomes of it."""
