"""Layers from a table of a spreadsheet or a profiler: a CSV file with a row per layer and a column per key.

An object with ``files`` names the files of another profiler instead (:mod:`.galvatron`). In a table, a key
inside another one has a dot (``memory.static``). F, I, W and B stand for the times, and ``memory`` for what a
layer keeps from its F to the end of its backward.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Any

from zbv_solver.documents.files import number, read_text
from zbv_solver.documents.galvatron import with_profile_read
from zbv_solver.errors import InvalidInput, Issue

_SHORT = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward"}
_DELIMITERS = ",;\t"


def with_files_read(document: Any, folder: Path) -> Any:
    """A problem's document with the layers of files in ``folder``, if its key ``layers`` names some.

    Raises
    ------
    InvalidInput
        When a cell is no number, a column occurs twice, or there are no rows; names the table and the line.
        As :func:`.with_profile_read`.
    OSError
        When a file cannot be read.
    """
    if not isinstance(document, dict):
        return document
    if isinstance(document.get("layers"), dict):
        return with_profile_read(document, folder)
    if not isinstance(document.get("layers"), str):
        return document
    path = folder / document["layers"]
    lines = read_text(path).removeprefix("\ufeff").splitlines()  # spreadsheets write a byte order mark
    delimiter = max(_DELIMITERS, key=lines[0].count) if lines else ","
    table = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    names = Counter(name.strip() for name in table.fieldnames or () if name.strip())
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:  # a row would have the last one's cell
        detail = f"found the column {repeated[0]} more than once in {path}; remove all but one."
        raise InvalidInput.at("/layers", detail)
    layers, issues = [], list[Issue]()
    for row in table:
        try:
            layers.append(_layer(row))
        except ValueError as error:
            issues.append(Issue("/layers", f"{path}, line {table.line_num}: {error}"))
    if not layers and not issues:
        issues.append(
            Issue("/layers", f"found no rows in {path}; it must have a header and a row per layer.")
        )
    if issues:
        raise InvalidInput(issues)
    return {**document, "layers": layers}


def _layer(row: dict[str | None, Any]) -> dict[str, Any]:
    """The layer of a row; empty cells are absent keys. Raises ValueError for a wrong cell."""
    layer: dict[str, Any] = {}
    for column, text in row.items():
        if column is None:
            raise ValueError(f"found {len(text)} more cells than the header has columns.")
        if text is None or not text.strip():
            continue
        *inside, key = _SHORT.get(column.strip(), column.strip()).split(".")
        place = layer
        for outer in inside:
            place = place.setdefault(outer, {})
            if not isinstance(place, dict):
                raise ValueError(
                    f"column {column}: {outer} is a number in another column; use one of the two."
                )
        if key in place:
            raise ValueError(f"column {column}: found {key} in another column too; use one of the two.")
        place[key] = text.strip() if key == "name" else _number(column, text)
    if isinstance(layer.get("memory"), float | int):
        kept = layer["memory"]
        layer["memory"] = {"forward": kept, "backward_input": 0, "backward_weight": -kept}
    return layer


def _number(column: str, text: str) -> float | int:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"column {column}: found {text!r}; must be a number, without a unit.")
    return number(found)
