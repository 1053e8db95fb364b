"""Orders from scratch: the structured greedy, list scheduling, and classical schedules.

Improving an order is the task of :mod:`zbv_solver.improve`; choosing among orders is that of
:mod:`zbv_solver.search`.
"""
