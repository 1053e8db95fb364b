"""Workloads of comparisons: dataclasses with defaults, which a JSON file may override."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from zbv_worker.errors import InvalidRun

Workload = TypeVar("Workload")


def read_workload(kind: type[Workload], path: Path | None) -> Workload:
    """Return a workload with the fields of a file, or with the defaults.

    Raises
    ------
    InvalidRun
        If the file cannot be read or does not fit.
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
    """Return the workload of a decoded document; unknown fields are errors."""
    return TypeAdapter(kind).validate_python(document)


def workload_json(workload: Any) -> dict[str, Any]:
    """Return the document of a workload."""
    return asdict(workload)
