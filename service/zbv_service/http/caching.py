"""How long answers may be kept."""

IMMUTABLE = "private, max-age=31536000, immutable"
"""For good: of what is named by its hash. A cache for several would give it to those without a token."""
HOUR = "public, max-age=3600"
"""For what changes with versions of the service only."""
