"""Bounded computation in other processes: fair queues, deadlines, isolated processes and caches.

It runs any function that a request needs. Searches, which run for long, have
:mod:`zbv_service.searches.executors`.
"""
