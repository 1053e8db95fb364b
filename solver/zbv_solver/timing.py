"""When every action starts and ends under an order, and what the order achieves (stub of signatures)."""
