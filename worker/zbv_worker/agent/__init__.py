"""The node agent: offers a node to a service, and runs the ranks that the service assigns to it.

The daemon never imports torch; only the ranks that it starts do.
"""
