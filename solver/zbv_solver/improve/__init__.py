"""Ways to improve an order, and to prove that none is better."""
