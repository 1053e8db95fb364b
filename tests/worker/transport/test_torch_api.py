"""What the worker passes to torch's NCCL, whose classes exist only in builds with CUDA; torch's errors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from zbv_worker.transport.torch_api import GroupOptions, TorchNccl, classified


class Config:
    """The fields of ``ProcessGroupNCCL.NCCLConfig``, as in torch's stubs."""

    __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")


class Options:
    """The fields of ``ProcessGroupNCCL.Options`` that torch's stubs have, with torch's default timeout."""

    __slots__ = ("_timeout", "config", "is_high_priority_stream", "split_color", "split_from")

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = Config()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of ``new_group``."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: found.append({"ranks": ranks, **more}))
    return found


def test_a_group_has_few_thread_blocks_and_a_stream_of_high_priority(created: list[dict[str, Any]]) -> None:
    assert TorchNccl().new_group([3, 1], timedelta(days=1), GroupOptions(max_ctas=4), "a channel") is None
    (call,) = created
    assert (call["ranks"], call["backend"], call["group_desc"]) == ([1, 3], "nccl", "a channel")
    options = call["pg_options"]
    assert options.is_high_priority_stream
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)


def test_the_options_have_the_groups_timeout(created: list[dict[str, Any]]) -> None:
    TorchNccl().new_group([0, 1], timedelta(days=1), GroupOptions(), "all ranks")
    (call,) = created
    assert call["pg_options"]._timeout == call["timeout"] == timedelta(days=1)
    assert not hasattr(call["pg_options"].config, "max_ctas"), "NCCL chooses"


def test_groups_with_a_stream_of_high_priority_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(*priorities: bool) -> SimpleNamespace:
        def backend(device: torch.device) -> SimpleNamespace:
            assert device.type == "cuda"
            if not priorities:
                raise RuntimeError("No backend type associated with device type cuda")
            return SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=priorities[0]))

        return SimpleNamespace(_get_backend=backend)

    of_gloo = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace()))
    groups = [group(True), group(False), group(), of_gloo, group(True)]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    assert TorchNccl().streams_of_groups() == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[/build/gloo/tcp/pair.cc:547] Connection closed by peer [::1]", "Connection closed by peer [::1]"),
        ("[../gloo/transport/tcp/buffer.cc:78] Timed out waiting 100ms", "Timed out waiting 100ms"),
        (
            "Read error [::1]: Connection reset. This is typically caused by a remote worker. GLHF!",
            "Read error [::1]: Connection reset",
        ),
        ("Connection reset\nException raised from x", "Connection reset"),
    ],
)
def test_an_error_has_no_path_of_a_source_and_no_trace(text: str, said: str) -> None:
    assert str(classified(RuntimeError(text), "receive")) == f"receive: {said}"


@pytest.mark.parametrize(("text", "kind"), [("Timed out", TimeoutError), ("closed", ConnectionError)])
def test_only_the_text_tells_a_timeout_from_a_lost_connection(text: str, kind: type[Exception]) -> None:
    assert isinstance(classified(RuntimeError(text), "receive"), kind)
