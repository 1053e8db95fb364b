"""Checkpoints: their files, what they hold, who writes them, and who may."""
