"""The best objective at every memory limit: which limits to search, and how to combine what was found.

The searches are made by a function that the caller passes in.
"""
