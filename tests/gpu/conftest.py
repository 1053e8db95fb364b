"""Tests that need a GPU. ``make gpu`` runs them; without a GPU, pytest collects none and says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_devices import Body, Devices, Run
from support.paths import ROOT
from zbv_worker.check import devices_finding, environment_finding

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()


def is_named(config: pytest.Config) -> bool:
    """Whether the command line names tests of this folder; other runs of pytest leave GPUs alone."""
    return any(Path(argument.partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args)


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, say so in one line, and fail."""
    if is_named(config) and not GPUS:
        pytest.exit(f"tests/gpu needs a CUDA GPU; torch {torch.__version__} finds none", returncode=1)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collect nothing if only the whole suite is meant."""
    return None if is_named(config) else True


@pytest.fixture(scope="session", autouse=True)
def versions(record_testsuite_property: Callable[[str, object], None]) -> None:
    """State in the report what the tests ran on."""
    for finding in (devices_finding("cuda", GPUS), environment_finding(os.environ)):
        record_testsuite_property(finding.name, finding.text)


@pytest.fixture(autouse=True)
def ranks_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of ranks import tests and worker, whether or not the worker is installed."""
    monkeypatch.setenv(
        "PYTHONPATH", ":".join(str(ROOT / name) for name in ("tests", "worker", "solver", "service"))
    )


@pytest.fixture
def run() -> Run:
    """Runs a function on ranks with a GPU each."""

    def run(body: Body, ranks: int = 1) -> list[Any]:
        _require(ranks)
        return Devices("cuda", "nccl", ranks).run(body, ranks)

    return run


@pytest.fixture(params=["gloo", "nccl"])
def devices(request: pytest.FixtureRequest) -> Devices:
    """Ranks over gloo, which share GPUs if there are too few, and ranks over NCCL with a GPU each."""
    if request.param == "nccl":
        _require(2)
        return Devices("cuda", "nccl", min(4, GPUS))
    return Devices("cuda", "gloo", 2)


@pytest.fixture
def alone() -> Devices:
    """One rank with a GPU."""
    return Devices("cuda", "gloo", 1)


@pytest.fixture
def device() -> torch.device:
    """This process's GPU."""
    return torch.device("cuda", 0)


def _require(gpus: int) -> None:
    if gpus > GPUS or not dist.is_nccl_available():
        pytest.skip(f"needs NCCL and {gpus} GPUs; found {GPUS} GPUs")
