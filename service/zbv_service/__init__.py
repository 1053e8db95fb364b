"""zbv_service: searches over HTTP, durable and resumable. The command is ``zbv-service``.

Nothing is imported here, so that the thin client (:mod:`zbv_service.client`) loads on machines that have
neither a web framework nor a database.
"""
