"""Searches: accepted, queued, leased and computed."""
