"""Metrics, logs, and the ids that connect log lines of one request or search.

Other folders report to this one, which imports none of them.
"""
