"""The independent check of a plan: completeness, deadlocks, memory, and every stated metric.

Nothing here is shared with `timing` or `search`, so a mistake there cannot hide here. Lower bounds are not
checked here, because that takes a proof (`search.claims`).
"""
