"""Models that ship with the worker: for the demonstration, for profiling a machine, and as examples."""
