"""The frontier of a plan's model: the best stored plan within each memory limit, and the bounds.

It stores nothing; its points are ordinary plans and searches.
"""
