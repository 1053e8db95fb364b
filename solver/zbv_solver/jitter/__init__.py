"""How much durations vary: the model of the noise, its documents, and its draws.

Schedules are simulated with the draws in `timing` and `search`; residuals of traces are in `measure`.
"""
