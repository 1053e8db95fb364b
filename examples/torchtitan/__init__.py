"""torchtitan runs a plan: the hook for a model spec, and an example that trains (docs/torchtitan.md)."""
