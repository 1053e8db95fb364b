"""The demonstration of ``make run``: profile a model, plan it, train it and compare schedules.

It starts a service and ranks on this machine.
"""
