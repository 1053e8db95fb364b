"""Searches: what is asked, and the processes that answer it."""
