"""Authentication and authorization: tokens, scopes, browser sessions and security headers.

Limits on the size and number of requests are in :mod:`zbv_service.api`.
"""
