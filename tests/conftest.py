"""Settings for all tests."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.shares import Shares, share_of

# `make explore` runs the property tests with the last profile and a random seed, and `make suite` with
# ARGS=--hypothesis-seed=1 runs all tests with the second and that seed.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("seeded", deadline=None, derandomize=False, print_blob=True, max_examples=40)
settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    print_blob=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)

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
STATUS = Path("/proc/self/status")
DURATIONS = TESTS / "durations.json"
_LONG_SECONDS = 4
_ASYNC_SECONDS = 360.0
"""Less than pytest's ``timeout``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--store-durations``."""
    parser.addoption(
        "--store-durations",
        action="store_true",
        help=f"write how long each file takes to {DURATIONS.name}; the longest files start first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure durations where the reports of all processes arrive, and import the tests faster."""
    seeded = config.getoption("--hypothesis-seed", None) is not None
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "seeded" if seeded else "repeatable"))
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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Cancel an asynchronous test that takes too long.

    The exception that pytest-timeout raises ends the event loop, but not the test in it. The next
    asynchronous fixture then waits for that test forever.
    """
    if isinstance(item, pytest.Function) and iscoroutinefunction(item.obj):
        item.obj = _cancelled_late(item.obj)


def _cancelled_late(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @wraps(test)
    async def cancelled_late(*given: Any, **named: Any) -> None:
        async with asyncio.timeout(_ASYNC_SECONDS):
            await test(*given, **named)

    return cancelled_late


@pytest.fixture(scope="module", autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    """No test may leave the system's handler, which CP-SAT does unless told otherwise.

    The next test of Ctrl-C would kill its process.
    """
    yield
    if STATUS.exists():
        (caught,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("SigCgt"))
        assert int(caught, 16) >> (signal.SIGINT - 1) & 1, "SIGINT now has the system's handler"


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
