"""From layers to stages: where to cut a model, on which placement, and what to recompute.

Cuts are compared here by loads and by quickly constructed orders. The full search on the best cuts is in
`search`.

The words: layers that stay together are a *part*. *Bounds* are the boundaries of stages, counted in parts. A
*cut* has the boundaries counted in layers, and which stages are recomputed. A *space* is all cuts that a
problem allows on a placement. For a fixed order, a *choice* is bounds and how many layers of every stage are
recomputed.
"""
