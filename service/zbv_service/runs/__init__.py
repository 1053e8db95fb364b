"""Training runs: accepted, scheduled on agents, followed, replanned; and the traces and logs of ranks.

The agents themselves are part of ``zbv_worker``.
"""
