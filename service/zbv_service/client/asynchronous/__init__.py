"""The client for asyncio. ``service/make_synchronous_client.py`` generates the blocking client from it."""
