"""Searches on a Dask cluster: an executor, its connection to the scheduler, and the code of the workers."""
