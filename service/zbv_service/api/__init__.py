"""The HTTP API: routers, request bodies, caching, error handlers and the OpenAPI document.

Routers translate HTTP into calls of the packages below and contain no other logic. HTML is in
:mod:`zbv_service.pages`.
"""
