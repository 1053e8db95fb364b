"""Checksums of a checkpoint's files, by which a resuming run finds damaged ones.

``checksums.json`` has the CRC-32 of every other file. It is written after them, and before the index gets its
name, which makes the checkpoint complete. The ranks divide the files among them, so a resuming run reads a
checkpoint once.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

CHECKSUMS = "checksums.json"
_BLOCK = 4 * 1024**2
_Name = Annotated[str, Field(pattern=r"^(rank-\d{5,}\.safetensors|index\.json)$")]  # never a path outside
_CHECKSUMS = TypeAdapter(dict[_Name, int])


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file. Raises OSError."""
    found, block = 0, bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            found = zlib.crc32(memoryview(block)[:count], found)
    return found


def write_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the checksums of a checkpoint's files, by name. Raises OSError."""
    path = folder / CHECKSUMS
    with path.open("wb") as file:
        file.write(_CHECKSUMS.dump_json(dict(checksums)))
        file.flush()
        os.fsync(file.fileno())


def damage_of(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is damaged in a complete checkpoint; None if nothing is.

    Parameters
    ----------
    part, parts
        Check every ``parts``-th file, from number ``part`` on; another rank checks the others.

    Raises
    ------
    OSError
        If a file cannot be read now, for a reason that may pass.
    """
    name = CHECKSUMS
    try:
        checksums = _CHECKSUMS.validate_json((folder / CHECKSUMS).read_bytes())
        for name in sorted(checksums)[part::parts]:
            if checksum_of(folder / name) != checksums[name]:
                return f"{name} is not as it was written: its checksum differs"
    except ValidationError:
        return f"{name} is not as it was written: it has no checksums"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        return f"{name}: {error.strerror}"
    return None
