"""What a rank does with its device before it meets the others."""

from __future__ import annotations

import pytest
import torch
from zbv_worker.transport.world import create_early


def test_a_product_runs_forward_and_backward_before_the_device_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, the first product on a thread creates a handle of cuBLAS, which may wait for the device."""
    ran: list[str] = []
    device = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ran.append("synchronize"))
    with torch.profiler.profile() as profile:
        create_early(device)
    names = [event.name for event in profile.events()]
    assert sum(name == "aten::mm" for name in names) == 3, "one product forward, two backward"
    assert ran == ["synchronize"]
