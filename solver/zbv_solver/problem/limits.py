"""How large a problem may be."""

from __future__ import annotations

MAX_PP_DEGREE = 1024
MAX_CHUNKS = 64
"""Most stages per rank."""
MAX_STAGES = MAX_PP_DEGREE * MAX_CHUNKS
MAX_CELLS = 1 << 21
"""Largest ``pp_degree * microbatches``, such as 256 ranks and 8192 microbatches. With two stages per rank
this is 12.6 million actions: the command plans them in 2 GB of memory, and reads the plan in 2.5 GB."""
MAX_ACTIONS = 6 * MAX_CELLS
"""Most actions of a plan: F, I and W of at most ``2 * MAX_CELLS`` pairs of stage and microbatch."""
MAX_DEVICES = 8
"""Most kinds of devices of a problem by layers."""
MAX_LAYERS = 512
"""Most layers of a model, counting copies."""
