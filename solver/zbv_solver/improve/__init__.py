"""Better orders: parameter search, annealing, and CP-SAT, which also proves that no order is better.

How much of each a search spends, and when, is decided in :mod:`zbv_solver.search`.
"""
