"""What compiled kernels take: arrays of floats and of integers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]
"""Integers of any width; a kernel's docstring states the width where it matters."""
BoolArray = NDArray[np.bool_]

ZERO = cast(int, np.int64(0))
"""0 as an argument of a kernel. Numba would compile the kernel a second time for a literal 0."""
