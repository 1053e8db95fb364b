"""The best objective at every memory limit: which limits to search, and how to combine the plans.

The caller passes in the function that searches a plan.
"""
