"""Environment variables of CUDA, NCCL and torch: what is set, replaced, refused, and documented."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.paths import ROOT
from zbv_worker.errors import InvalidRun
from zbv_worker.transport import torch_api
from zbv_worker.transport.nccl_environment import TABLE, apply
from zbv_worker.transport.nccl_operations import CHANNEL_OPTIONS
from zbv_worker.transport.torch_api import TorchNccl


def test_an_empty_environment_gets_what_the_pipeline_needs_and_nothing_is_said() -> None:
    environment: dict[str, str] = {}
    assert apply(environment) == []
    assert environment == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_MAX_P2P_NCHANNELS": "4",
        "NCCL_RUNTIME_CONNECT": "0",
    }
    assert apply(environment) == [], "a second application changes nothing"


@pytest.mark.parametrize(
    ("name", "theirs", "stays", "message"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "32", "found 1; now 32. "),  # Megatron-LM asks for one
        ("CUDA_MODULE_LOADING", "LAZY", "EAGER", "found LAZY; now EAGER. "),  # CUDA's default
        ("NCCL_MAX_P2P_NCHANNELS", "16", "16", "found 16; recommended 4."),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "DETAIL", "found DETAIL; recommended OFF."),
    ],
)
def test_only_a_value_with_which_a_pipeline_hangs_does_not_stay(
    name: str, theirs: str, stays: str, message: str
) -> None:
    environment = {name: theirs}
    (said,) = apply(environment)
    assert environment[name] == stays
    assert said.startswith(f"{name}: {message}")


def test_watchdogs_of_other_groups_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads these variables whenever it creates a group."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before, seen = dict(os.environ), dict[str, str]()
    assert apply(os.environ | {}) == []

    def new_group(*_: object, **__: object) -> None:
        seen.update(os.environ)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(torch_api, "_options", lambda *_: None)  # needs a torch with CUDA
    TorchNccl().new_group([0, 1], timedelta(seconds=1), CHANNEL_OPTIONS, "channel")
    assert (seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"], seen["TORCH_NCCL_ENABLE_MONITORING"]) == ("0", "0")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "name", [variable.name for variable in TABLE if variable.action == "refuse" and variable.wanted]
)
def test_a_value_with_which_ranks_would_wait_forever_is_refused(name: str) -> None:
    with pytest.raises(InvalidRun, match=f"environment variable {name}: found '1'; must be 0, or absent"):
        apply({name: "1"})
    assert apply({name: "0"}) == []


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_an_allocator_without_a_cache_is_refused_whatever_the_value(value: str) -> None:
    with pytest.raises(InvalidRun, match=f"PYTORCH_NO_CUDA_MEMORY_CACHING: found '{value}'; must be absent"):
        apply({"PYTORCH_NO_CUDA_MEMORY_CACHING": value})


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "nccl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.+?) \| (\w+) \| (.+?) \|$", page, re.MULTILINE)
    expected = [(v.name, " or ".join(v.wanted.split()) or "none", v.action, v.reason) for v in TABLE]
    assert rows == expected


@pytest.mark.parametrize("environment", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
def test_variables_that_come_after_the_start_of_cuda_are_refused(environment: dict[str, str]) -> None:
    before = dict(environment)
    with pytest.raises(InvalidRun, match="CUDA_DEVICE_MAX_CONNECTIONS=32"):
        apply(environment, has_cuda_started=True)
    assert environment == before


def test_variables_that_were_right_before_the_start_of_cuda_are_fine() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    assert apply(environment, has_cuda_started=True) == []
