"""A table of layers is the same problem as the layers in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.layered import layered_problem
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.reading import load_problem

HEADER = "name,repeat,F,I,W,B,memory,memory.static,output_bytes,recompute.backward_input"


TIMES = ("forward", "backward_input", "backward_weight")


def given(*layers: dict[str, Any]) -> Any:
    return layered_problem({"pp_degree": 2, "microbatches": 8, "placement": "single", "layers": [*layers]})


def layer(name: str, *times: float, **more: Any) -> dict[str, Any]:
    return {"name": name, **dict(zip(TIMES, times, strict=True)), **more}


def loaded(folder: Path, table: str) -> Any:
    (folder / "layers.csv").write_text(table)
    path = folder / "problem.json"
    path.write_text(
        json.dumps({"pp_degree": 2, "microbatches": 8, "placement": "single", "layers": "layers.csv"})
    )
    return load_problem(path)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", ", "])
def test_rows_are_layers_and_columns_their_keys(delimiter: str, tmp_path: Path) -> None:
    rows = [HEADER.replace("memory,", ""), "a,,1,2,3,4,,8e6,", "block,4,1,1,1.5,,0.5,,7"]
    found = loaded(tmp_path, "\r\n".join(row.replace(",", delimiter) for row in rows) + "\r\n")
    block = {"repeat": 4, "memory": {"static": 0.5}, "recompute": {"backward_input": 7}}
    assert found == given(
        layer("a", 1, 2, 3, backward=4, output_bytes=8e6), layer("block", 1, 1, 1.5, **block)
    )


def test_a_number_for_the_memory_is_kept_until_the_end_of_the_backward(tmp_path: Path) -> None:
    found = loaded(tmp_path, "\ufeffname,F,I,W,memory\na,1,1,1,2\nb,1,1,1,\n")
    kept = {"forward": 2, "backward_input": 0, "backward_weight": -2}
    assert found == given(layer("a", 1, 1, 1, memory=kept), layer("b", 1, 1, 1))


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("name,F,I,W\na,1,1,1\nb,1 ms,1,1\n", "line 3: column F: found '1 ms'; must be a number"),
        ("name,F,I,W\na,1,nan,1\n", "line 2: column I: found 'nan'; must be a number"),
        ("name,F,I,W\na,1,1,1,1\n", "line 2: found 1 more cells than the header has columns"),
        ("name,F,I,W\na,1,,1\n", "/layers/0/backward_input: this key is required"),
        ("name,F,I,W, F\na,1,1,1,100\n", "found the column F more than once"),
        ("name,F,I,W,seconds\na,1,1,1,2\n", "/layers/0/seconds: unknown key"),
        (
            "name,F,I,W,memory,memory.static\na,1,1,1,2,3\n",
            "line 2: column memory.static: memory is a number",
        ),
        ("name,F,I,W\n", "found no rows in"),
        ("", "found no rows in"),
    ],
)
def test_a_wrong_table_is_refused_with_the_place(table: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        loaded(tmp_path, table)
    assert found in str(refused.value)
