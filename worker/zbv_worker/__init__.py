"""zbv_worker: runs a plan's action lists on real ranks, and measures what a plan is made from.

torch lives here and only here. The worker knows the solver's plan format and the service's thin client.
"""
