"""Settings for all tests."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

# `make explore` runs the property tests with the second profile and a random seed.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
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
_SHARES = {
    # They share a service, which has already loaded its planner.
    "browser": ("web/",),
    # They wait for agents, ranks and timeouts. If all processes wait at the same time, the cores are idle.
    "waiting": (
        "service/compute/test_processes.py",
        "worker/agent/",
        "worker/training/test_lost_ranks.py",
        "worker/training/test_run.py",
    ),
}
"""Files and folders that one process runs. Every other file is one share."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--store-durations``."""
    parser.addoption(
        "--store-durations",
        action="store_true",
        help=f"write how long each file takes to {DURATIONS.name}; the longest files start first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure durations where the reports of all processes arrive, and import the tests faster."""
    is_controller = config.getoption("numprocesses", 0) and not hasattr(config, "workerinput")
    if not is_controller:  # it collects no tests
        # Imports and collected tests are never garbage: looking for it takes a fifth of the collection.
        gc.disable()
    if config.getoption("--store-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_StoredDurations())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares | None:
    """Distribute shares of the tests instead of files."""
    return Shares(config, log) if config.getoption("dist") == "loadfile" else None


class Shares(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives one process all tests of a share."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid.partition("::")[0].removeprefix("tests/"))


def share_of(name: str) -> str:
    """The share of a file: the name of a share, or of the file."""
    return next((share for share, names in _SHARES.items() if name.startswith(names)), name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long shares first.

    A long share that starts last leaves the other processes idle.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for name, taken in json.loads(DURATIONS.read_text()).items():
        seconds[share_of(name)] += taken
    shares = {path: share_of(path.relative_to(TESTS).as_posix()) for path in {item.path for item in items}}
    items.sort(key=lambda item: -seconds[shares[item.path]])


def pytest_collection_finish() -> None:
    """Exclude all imported objects from garbage collection, which goes on from here."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
