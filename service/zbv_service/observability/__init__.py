"""Metrics, logs, and the ids that connect log lines of one request or search.

Other packages report here; nothing here knows them.
"""
