"""Runs a plan with real transfers and sleeps in place of compute, and holds it against what was planned."""
