"""Converts a checkpoint of an older zbv: ``python -m zbv_worker.training.convert_checkpoint FOLDER``.

Older versions used torch.distributed.checkpoint, whose files are pickled: reading one runs any code that its
writer put there. So runs never read them. Use this program only for checkpoints that you trust.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from zbv_worker.errors import InvalidRun, print_error
from zbv_worker.training.checkpoint import OLD_INDEX
from zbv_worker.training.checkpoint_files import INDEX, RankFiles, State, write_index


def convert(folder: Path) -> None:
    """Convert a checkpoint in place; raises :class:`InvalidRun` if there is none, or OSError."""
    if (folder / INDEX).is_file() or not (folder / OLD_INDEX).is_file():
        raise InvalidRun(f"{folder}: found no checkpoint of an older zbv. Give a folder step-NNNNNNNN.")
    converted = folder.with_name(f"{folder.name}.converted")
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    RankFiles.of(0, _state(_read(folder))).write(converted)
    write_index(converted, 1)
    original = folder.with_name(f"{folder.name}.original")
    folder.rename(original)
    converted.rename(folder)
    shutil.rmtree(original)


def _read(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    # As torch's own dcp_to_torch_save.
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]  # torch's own
        no_dist=True,
    )
    return found


def _state(found: dict[str, Any]) -> State:
    state = State()
    for kind in ("model", "optimizer"):
        for name, value in found.get(kind, {}).items():
            where = state.tensors if isinstance(value, Tensor) else state.values
            where[f"{kind}.{name}"] = value
    for name, value in found["progress"].items():
        if name != "schedule" or value:
            state.values[f"progress.{name}"] = value
    milestones = found["progress"].get("schedule", {}).get("milestones")
    if isinstance(milestones, dict):
        # torch.distributed.checkpoint turns integer keys into strings, which MultiStepLR does not find.
        state.values["progress.schedule"]["milestones"] = Counter({int(k): v for k, v in milestones.items()})
    state.values |= {name: value for name, value in found.items() if name.startswith(("random.", "data."))}
    return state


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]))
    except InvalidRun as error:
        sys.exit(print_error(error))
