"""Benchmarks of the planner, the service and the worker: ``python -m benchmarks``.

They run from a checkout and are not part of the wheel. docs/benchmarks.md explains them and shows their
results. Some measure what the tests also check, with the same models and requests, so ``tests`` is on the
path of imports.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
