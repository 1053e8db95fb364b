"""Which parallel layout trains a model fastest on a cluster: enumerated, bounded, planned, with a proof."""
