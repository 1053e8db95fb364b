"""HTTP itself: bodies, errors, the OpenAPI document."""
