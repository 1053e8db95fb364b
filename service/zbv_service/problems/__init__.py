"""Answers about a problem without a stored search: checks, estimates, comparisons and packings.

Accepting a problem for a search is in :mod:`zbv_service.searches`.
"""
