"""Training runs: accepting them, scheduling agents, following nodes, replanning, and traces and logs of ranks.

The agents themselves are part of ``zbv_worker``.
"""
