"""Predicted against measured: step times and memory of published training runs, or of own ones."""
