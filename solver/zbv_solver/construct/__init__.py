"""Ways to make an order from scratch: structured greedy, list scheduling, classical schedules."""
