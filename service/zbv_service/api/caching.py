"""Values of ``Cache-Control``."""

IMMUTABLE = "private, max-age=31536000, immutable"
"""Resources stored under their hash. Private, because a shared cache would not check tokens."""
REVALIDATED = "private, no-cache"
"""Resources that this version derives from stored ones; clients revalidate them with the ETag."""
HOUR = "public, max-age=3600"
"""Resources that change only with the version of the service."""
