"""From layers to stages: where to cut a model, on which placement, and what to recompute.

Cuts are compared here by loads and by quickly constructed orders. The full search on the best cuts is in
`search`.
"""
