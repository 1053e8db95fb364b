"""The blocking client. ``service/make_synchronous_client.py`` generates it from ``asynchronous/``."""
