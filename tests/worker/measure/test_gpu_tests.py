"""The GPU tests of memory and costs, on a CPU."""

from __future__ import annotations

import pytest
from gpu.test_costs import (
    test_a_step_takes_the_time_and_the_memory_of_its_plan,
    test_stages_hold_what_an_estimate_without_a_gpu_states,
)
from support.on_devices import Devices

__all__ = [
    "test_a_step_takes_the_time_and_the_memory_of_its_plan",
    "test_stages_hold_what_an_estimate_without_a_gpu_states",
]


@pytest.fixture
def alone() -> Devices:
    """A rank on a CPU."""
    return Devices("cpu", "gloo", 1)
