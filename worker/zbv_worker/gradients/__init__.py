"""From the gradients of stages to those that the optimizer gets: sums over ranks, accumulation, means."""
