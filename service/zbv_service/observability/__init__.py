"""What the service says about itself: metrics, log lines, and the ids that tie lines together."""
