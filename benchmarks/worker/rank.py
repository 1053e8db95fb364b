"""One rank of a comparison: see :mod:`benchmarks.worker.ranks`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from zbv_worker.measure.ranks import answer, use_one_core
from zbv_worker.transport.world import World


def main(request: dict[str, Any], world: World) -> Any:
    """Measure as one rank; returns the comparison's answer."""
    use_one_core(world)
    return import_module(f"benchmarks.worker.{sys.argv[1]}").on_rank(request, world)


if __name__ == "__main__":
    answer(main)
