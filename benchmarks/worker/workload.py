"""What a comparison measures: a dataclass with defaults, some of whose fields a JSON file may replace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from zbv_worker.errors import InvalidRun

Workload = TypeVar("Workload")


def read_workload(kind: type[Workload], path: Path | None) -> Workload:
    """A workload with the fields of a file; all defaults without one.

    Raises
    ------
    InvalidRun
        When the file cannot be read or does not fit.
    """
    if path is None:
        return kind()
    try:
        return parse_workload(kind, json.loads(path.read_text()))
    except OSError as error:
        raise InvalidRun(f"--workload {path}: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRun(
            f"--workload {path}: {where}: found {first['input']!r}; {first['msg']}. See benchmarks/worker."
        ) from error
    except ValueError as error:
        raise InvalidRun(f"--workload {path}: not JSON ({error}).") from error


def parse_workload(kind: type[Workload], document: dict[str, Any]) -> Workload:
    """A workload from a decoded document; unknown fields are errors."""
    return TypeAdapter(kind).validate_python(document)


def workload_json(workload: Any) -> dict[str, Any]:
    """The document of a workload."""
    return asdict(workload)
