"""Measures what plans are made from: costs, memory, transfers."""
