"""Searches: accepting, queueing, leasing, running and following them.

The search algorithm is in :mod:`zbv_solver`; other computations for requests are in
:mod:`zbv_service.compute`.
"""
