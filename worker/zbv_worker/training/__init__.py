"""From steps to a run: gradients, optimizer, precision, replicas, checkpoints, changes of plan."""
