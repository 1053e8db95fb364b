"""Compares a measured step with its plan: the step's timeline, where its time went, and why it took longer.

Reading traces from the database is in :mod:`zbv_service.runs.measurements`.
"""
