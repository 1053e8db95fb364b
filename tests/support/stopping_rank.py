"""``zbv-worker run`` as a rank that stops itself (SIGSTOP) right after a check of its fence, at a given step.

``ZBV_TEST_STOP`` is ``STEP:N``: at the Nth check of publishing the checkpoint before that step. Rank 0 alone
checks; the others go on until they need it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from zbv_worker.checkpoints.fence import Fence
from zbv_worker.commands.cli import main

_check, _publish = Fence.check, Fence.publish
_left = [0]


def check(self: Fence) -> None:
    _check(self)
    _left[0] -= 1
    if _left[0] == 0:
        # To this thread, which then cannot go on before the process stops.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def publish(self: Fence, step: int, kept: int) -> None:
    at, _, count = os.environ["ZBV_TEST_STOP"].partition(":")
    _left[0] = int(count) if step == int(at) else 0
    _publish(self, step, kept)


if __name__ == "__main__":
    Fence.check, Fence.publish = check, publish  # type: ignore[method-assign]
    sys.exit(main())
