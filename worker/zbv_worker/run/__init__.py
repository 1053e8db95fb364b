"""Whole runs: ``zbv-worker run``, and what an agent starts."""
