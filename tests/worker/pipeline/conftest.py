"""A pipeline in the process of a test sees no torchrun, as in a notebook."""

from __future__ import annotations

import pytest
from support.plans import searched, unit_problem
from zbv_solver.plans.plan import Plan


@pytest.fixture(autouse=True)
def as_in_a_notebook(no_environment: None) -> None:
    pass


@pytest.fixture(scope="session")
def plan() -> Plan:
    """A V of one rank with two microbatches. Some files have another plan."""
    return searched(unit_problem(1, 2))
