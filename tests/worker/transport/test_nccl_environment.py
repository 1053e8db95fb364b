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
    ("name", "theirs", "ours"),
    [("CUDA_DEVICE_MAX_CONNECTIONS", "1", "32"), ("CUDA_MODULE_LOADING", "LAZY", "EAGER")],
)
def test_a_value_with_which_a_pipeline_hangs_does_not_stay(name: str, theirs: str, ours: str) -> None:
    """Megatron-LM asks for one connection; lazy loading is CUDA's default."""
    environment = {name: theirs}
    (said,) = apply(environment)
    assert environment[name] == ours
    assert said.startswith(f"{name}: found {theirs}; now {ours}. ")


def test_the_watchdogs_of_groups_that_are_not_the_workers_keep_their_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_users_choice_of_a_default_stays_and_is_reported() -> None:
    environment = {"NCCL_MAX_P2P_NCHANNELS": "16"}
    (said,) = apply(environment)
    assert environment["NCCL_MAX_P2P_NCHANNELS"] == "16"
    assert said.startswith("NCCL_MAX_P2P_NCHANNELS: found 16; recommended 4.")


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


def test_a_doubtful_value_is_reported_and_stays() -> None:
    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    (said,) = apply(environment)
    assert said.startswith("TORCH_DISTRIBUTED_DEBUG: found DETAIL; recommended OFF.")
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "nccl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (.+?) \| (\w+) \| (.+?) \|$", page, re.MULTILINE)
    expected = [(v.name, " or ".join(v.wanted.split()) or "none", v.action, v.reason) for v in TABLE]
    assert rows == expected


@pytest.mark.parametrize(
    "environment", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "EAGER"}]
)
def test_variables_that_come_after_the_start_of_cuda_are_refused(environment: dict[str, str]) -> None:
    before = dict(environment)
    with pytest.raises(InvalidRun, match="CUDA_DEVICE_MAX_CONNECTIONS=32"):
        apply(environment, has_cuda_started=True)
    assert environment == before


def test_variables_that_were_right_before_the_start_of_cuda_are_fine() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    assert apply(environment, has_cuda_started=True) == []
