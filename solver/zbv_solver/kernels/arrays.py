"""The array types of kernels and of the code around them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[Any]
"""An array of integers; most are int32, to save memory."""
