"""Load on a real service, over loopback, from another process: what ``zbv-service bench`` runs."""
