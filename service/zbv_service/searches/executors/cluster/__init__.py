"""Searches on a Dask cluster: an executor, its connection to the scheduler, and what workers run."""
