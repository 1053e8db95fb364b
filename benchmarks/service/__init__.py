"""Load a real service over the loopback interface, from another process."""
