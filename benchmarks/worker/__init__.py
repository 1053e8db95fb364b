"""Benchmarks of the worker, one module per comparison.

Every number is a ratio of two measurements that took turns in the same processes, or a quantity that does not
depend on the load of the machine. Each has a confidence interval.
"""
