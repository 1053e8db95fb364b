"""From layers to stages: where a model is cut, on which placement, and what is recomputed."""
