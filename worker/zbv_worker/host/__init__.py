"""One machine: its cores, devices and processes, and the small files that processes exchange.

Nothing here imports torch or knows plans.
"""
