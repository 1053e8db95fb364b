"""Breaks the connections of a gloo group, so that nobody waits for a rank that has failed.

``ProcessGroup.abort`` has no effect on gloo in torch 2.13, and destroying a group closes nothing while an
operation waits. But gloo closes all connections of a group, on both sides, when a receive times out.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TAG = 1 << 20
"""No other operation uses this tag, so the receive can only time out."""
_AT_ONCE = timedelta(milliseconds=1)


def break_connections(group: dist.ProcessGroup) -> None:
    """Fail all pending and later operations of a gloo group, on its other ranks too; from any thread."""
    if group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):
            backend: Any = group._get_backend(torch.device("cpu"))
            backend.recv([torch.empty(1, device="cpu")], peer, _TAG).wait(_AT_ONCE)
