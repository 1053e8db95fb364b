"""``zbv-worker run`` as a rank that cannot write a checkpoint.

With ``ZBV_TEST_STUCK`` in the environment, rank 0's thread never ends writing the checkpoint of that step.
With ``ZBV_TEST_FULL``, the disk is full for rank 1 at that step, or at these steps.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

from zbv_worker.checkpoints.checkpoint_files import RankFiles
from zbv_worker.commands.cli import main

_write = RankFiles.write


def write(self: RankFiles, folder: Path) -> int:
    step = str(int(folder.name[5:13]))
    if self.rank == 0 and step == os.environ.get("ZBV_TEST_STUCK"):
        (folder / "rank-00000.safetensors").write_bytes(b"half")
        threading.Event().wait()
    if self.rank == 1 and step in os.environ.get("ZBV_TEST_FULL", "").split(","):
        (folder / "rank-00001.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return _write(self, folder)


if __name__ == "__main__":
    RankFiles.write = write  # type: ignore[method-assign]
    sys.exit(main())
