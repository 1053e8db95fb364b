"""The routes of the API, one module per resource. They only translate between HTTP and the packages below."""
