"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# What is imported is compiled once, not by every process of every test, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# There are more processes than cores already, and no tensor of a test is large.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Most services of the tests search nothing; those that do can wait for the planner to be loaded.
os.environ.setdefault("ZBV_PRELOAD", "at-first-search")

# Whoever starts the tests in the background of a script has them ignore Ctrl-C, and all their processes too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = (
    "worker/test_agent.py",
    "worker/test_agent_recovery.py",
    "end_to_end/test_make_run.py",
    "end_to_end/test_clusters.py",
    "web/test_plan_page.py",
    "service/test_scale_out.py",
    "service/test_processes.py",
    "solver/test_search.py",
    "solver/test_exact.py",
    "web/test_new_search.py",
    "web/test_live_search.py",
    "web/test_accessibility.py",
    "web/test_bench_page.py",
    "worker/test_rehearse.py",
    "worker/test_checkpoint.py",
    "end_to_end/test_clean_environment.py",
    "service/test_bench.py",
    "service/test_many_searches.py",
    "service/test_api_schema.py",
    "contract/test_runs_tables.py",
    "worker/test_torch_runtime.py",
    "worker/test_estimating.py",
    "worker/test_swap.py",
    "worker/test_with_service.py",
    "solver/test_bench.py",
    "bench/test_bench_command.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: a file is one process's, and a long one at the end leaves the other idle."""

    def place(item: pytest.Item) -> int:
        name = f"{item.path.parent.name}/{item.path.name}"
        return LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported stays: nobody need look again and again whether it is garbage."""
    gc.collect()
    gc.freeze()
