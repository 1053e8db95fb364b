"""How long answers may be kept."""

IMMUTABLE = "private, max-age=31536000, immutable"
"""For good: of what is stored under its hash. A cache for several would give it to those without a token."""
REVALIDATED = "private, no-cache"
"""Kept, and asked for again with its ETag: of what this version makes of something stored."""
HOUR = "public, max-age=3600"
"""For what changes with versions of the service only."""
