"""Array types of compiled kernels; :mod:`.jit` compiles them. Each kernel is in the module that calls it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[Any]
"""Integers of any width; a kernel's docstring states the width where it matters."""
