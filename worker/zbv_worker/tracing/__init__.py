"""What happened when, and what is reported of it."""
