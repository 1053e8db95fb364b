"""Stored plans: reading, importing, exporting, drawing and comparing them.

Searching for plans is in :mod:`zbv_service.searches`.
"""
