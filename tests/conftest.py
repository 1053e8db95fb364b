"""Settings for all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `make explore` runs the property tests with the second profile and a random seed.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    print_blob=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Compile each module once, even if the environment tells Python not to write bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The tests start more processes than there are cores, and their tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Most services in the tests never search; the others load the planner at their first search.
os.environ.setdefault("ZBV_PRELOAD", "at-first-search")

# A shell script that starts the tests in the background makes them, and all their processes, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
_LONG_SECONDS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--store-durations``."""
    parser.addoption(
        "--store-durations",
        action="store_true",
        help=f"write how long each file takes to {DURATIONS.name}; the longest files start first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure durations where the reports of all processes arrive."""
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_StoredDurations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first.

    One process runs all tests of a file, so a long file that starts last leaves the other processes idle.
    """
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(TESTS).as_posix(), 0))


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection."""
    gc.collect()
    gc.freeze()


class _StoredDurations:
    """Adds up the durations of each file's tests and writes them at the end."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest_first = sorted(self._seconds.items(), key=lambda item: -item[1])
        long = {name: round(taken) for name, taken in longest_first if taken > _LONG_SECONDS}
        DURATIONS.write_text(json.dumps(long, indent=2) + "\n")
