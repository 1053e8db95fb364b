"""The node agent: offers a node to a service and runs the ranks that it is given."""
