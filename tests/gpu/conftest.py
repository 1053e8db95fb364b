"""Tests that need a GPU. ``make gpu`` runs them; without a GPU, pytest collects none and says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.on_devices import Body, Devices, Run
from support.paths import ROOT, TESTS

GPUS = torch.cuda.device_count()
collect_ignore_glob = [] if GPUS else ["*"]


def pytest_report_header(config: pytest.Config) -> str:
    """One line about what can run here."""
    if GPUS:
        return f"tests/gpu: {GPUS} GPUs, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"tests/gpu: nothing is collected, because torch {torch.__version__} finds no CUDA GPU"


@pytest.fixture(autouse=True)
def ranks_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of ranks import tests and worker, whether or not the worker is installed."""
    monkeypatch.setenv(
        "PYTHONPATH", ":".join(map(str, (TESTS, ROOT / "worker", ROOT / "solver", ROOT / "service")))
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
def device() -> torch.device:
    """This process's GPU."""
    return torch.device("cuda", 0)


def _require(gpus: int) -> None:
    if gpus > GPUS or not dist.is_nccl_available():
        pytest.skip(f"needs NCCL and {gpus} GPUs; found {GPUS} GPUs")
