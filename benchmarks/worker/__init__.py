"""What the worker costs and reaches on this machine, held against targets: ``zbv-worker bench``.

One file per comparison. Every number is a ratio of two things that took turns in the same processes, or a
quantity that no other load on the machine changes; each says how far it scatters.
"""
