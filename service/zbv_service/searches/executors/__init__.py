"""Executors compute searches for the runner: in processes of this machine, or on a Dask cluster.

They know nothing about the database.
"""
