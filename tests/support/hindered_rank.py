"""``zbv-worker run`` whose rank 0 never ends writing the checkpoint of the step ``ZBV_TEST_STUCK``."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from zbv_worker.checkpoints.checkpoint_files import RankFiles
from zbv_worker.commands.cli import main

_write = RankFiles.write


def write(self: RankFiles, folder: Path) -> int:
    if self.rank == 0 and folder.name.startswith(f"step-{int(os.environ['ZBV_TEST_STUCK']):08d}"):
        (folder / "rank-00000.safetensors").write_bytes(b"half")
        threading.Event().wait()
    return _write(self, folder)


if __name__ == "__main__":
    RankFiles.write = write  # type: ignore[method-assign]
    sys.exit(main())
