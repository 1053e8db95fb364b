"""The GPU tests of pipelines, on CPUs over gloo."""

from __future__ import annotations

import warnings

import pytest
from gpu.test_pipelines import (
    test_a_pipeline_has_the_gradients_of_one_process,
    test_compiled_layers_have_the_gradients_of_others,
    test_no_call_in_a_step_makes_the_host_wait_for_the_device,
    test_replicas_have_the_mean_gradients_of_one_process,
)
from support.on_devices import Devices, host_waits

__all__ = [
    "test_a_pipeline_has_the_gradients_of_one_process",
    "test_compiled_layers_have_the_gradients_of_others",
    "test_no_call_in_a_step_makes_the_host_wait_for_the_device",
    "test_replicas_have_the_mean_gradients_of_one_process",
]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Ranks on CPUs."""
    # torch.compile takes most of a minute, and other tests compare its gradients. So layers run uncompiled.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    return Devices("cpu", "gloo", 2)


class SyncDebug:
    """``torch.cuda``'s switch for warnings about waits of the host, and a call that waits."""

    mode = "default"

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def item(self) -> None:
        if self.mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)


def test_calls_that_make_the_host_wait_are_noticed_within_the_step_only() -> None:
    cuda = SyncDebug()
    cuda.item()
    assert host_waits(lambda: None, cuda) == []
    (call,) = host_waits(cuda.item, cuda)
    assert "called a synchronizing CUDA operation" in call
    assert cuda.mode == "default"
