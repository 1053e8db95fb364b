"""One rank's list of actions: where it comes from, what its stages do, who walks it."""
