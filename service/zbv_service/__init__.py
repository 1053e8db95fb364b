"""The REST service of zbv: durable searches, training runs and pages; ``zbv-service`` starts it.

No package ``__init__`` imports its modules, except :mod:`zbv_service.database` and :mod:`zbv_service.client`:
the client, the Dask workers and the search processes each load only the modules that they need.
"""
