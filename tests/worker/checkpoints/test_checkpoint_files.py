"""A checkpoint's files: every value and tensor part can be read back, and reading runs no code."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pickled import Bomb
from torch import Tensor
from zbv_worker.checkpoints import checkpoint_files
from zbv_worker.checkpoints.checkpoint_files import INDEX, RankFiles, Reader, State, write_index
from zbv_worker.errors import InvalidRun


def write(folder: Path, *states: State) -> Reader:
    folder.mkdir(exist_ok=True)
    write_index(folder, [RankFiles.of(rank, state).write(folder) for rank, state in enumerate(states)])
    return Reader(folder)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, -(2**70), 1.0, 0.1 + 0.2, 1e-320],
    "not finite": [math.inf, -math.inf, math.nan],
    "text": "é\n\0",
    "nested": (3, (1, 2), None, {"a": [{"b": (4.0,)}]}),
    "keys that are not strings": {1: "x", (2, 3): "y", "tensor": 1, "dict": 2},
    "milestones": Counter({4: 1, 7: 2}),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "set": {3, 1, 2},
    "bytes": b"\x00\xff",
    "tensor": {"state": torch.arange(5, dtype=torch.uint8), "empty": torch.empty(0)},
    "numpy": ("MT19937", np.arange(3, dtype=np.uint32), np.float64(0.5), np.int8(-1), np.zeros((0, 2))),
}


def test_every_value_comes_back_with_its_type(tmp_path: Path) -> None:
    reader = write(tmp_path / "one", State(values=VALUES))
    for name, value in VALUES.items():
        assert name in reader
        assert same(reader.value(name), value), name
    assert "absent" not in reader


@pytest.mark.parametrize("value", [object(), print, torch.float32, [np.array([object()])], {"x": {object()}}])
def test_a_value_that_needs_pickle_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRun, match=r"data\.0.* which a checkpoint cannot hold"):
        write(tmp_path, State(values={"data.0": value}))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_and_shared_memory_is_stored_once(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.randn(64, 32) * 10).to(dtype)
    tensors = {"whole": tensor, "tied": tensor, "turned": tensor.t()}
    tensors |= {"row": tensor[3], "scalar": tensor[0, 0]}
    reader = write(tmp_path / "one", State(tensors={**tensors, "empty": tensor[:0]}))
    found = {name: torch.zeros_like(each) for name, each in tensors.items()}
    reader.read_into({**found, "empty": tensor[:0].clone()})
    for name, each in tensors.items():
        assert torch.equal(found[name], each), name
    twice = 2 * tensor.nbytes  # the transposed tensor is stored again, the tied one is not
    assert (tmp_path / "one" / "rank-00000.safetensors").stat().st_size < twice + tensor.nbytes // 2 + 2000


def test_parts_are_combined_and_a_gap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as FSDP2 shards them: by rows, unevenly, one of them empty."""
    whole = torch.arange(21.0).reshape(7, 3)
    bounds = [(0, 3), (3, 6), (6, 7), (7, 7)]
    blocks: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    def block(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
        return blocks.get(id(tensor), ((0,) * tensor.dim(), tensor))

    monkeypatch.setattr(checkpoint_files, "_block", block)
    shards = [whole.clone() for _ in bounds]
    for shard, (first, last) in zip(shards, bounds, strict=True):
        blocks[id(shard)] = ((first, 0), shard[first:last])
    reader = write(tmp_path / "whole", *(State({"x": shard}) for shard in shards))
    found = torch.zeros_like(whole)
    reader.read_into({"x": found})
    assert torch.equal(found, whole)
    part = torch.zeros_like(whole)  # a rank that now holds rows 2 to 6, from two saved parts
    blocks[id(part)] = ((2, 0), part[2:6])
    reader.read_into({"x": part})
    assert torch.equal(part[2:6], whole[2:6])
    assert float(part[:2].sum()) == float(part[6:].sum()) == 0.0
    gap = write(tmp_path / "gap", State({"x": shards[0]}), State({"x": shards[2]}))
    with pytest.raises(InvalidRun, match="it lacks 9 elements of 'x'"):
        gap.read_into({"x": found})


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    reader = write(tmp_path / "one", State({"x": torch.zeros(2, 3)}))
    with pytest.raises(InvalidRun, match=r"'x' has the shape \[2, 3\], but the run's has \[3, 2\]"):
        reader.read_into({"x": torch.zeros(3, 2)})
    with pytest.raises(InvalidRun, match="it lacks the tensor 'y'"):
        reader.read_into({"y": torch.zeros(1)})


def test_a_pickle_in_any_file_runs_no_code(tmp_path: Path) -> None:
    target = tmp_path / "made"
    bomb = pickle.dumps(Bomb(target))
    for file in (INDEX, "rank-00000.safetensors"):
        folder = tmp_path / file
        write(folder, State({"x": torch.ones(2)}, {"y": 1}))
        (folder / ".metadata").write_bytes(bomb)
        (folder / file).write_bytes(bomb)
        with pytest.raises(InvalidRun, match=file):
            Reader(folder).read_into({"x": torch.zeros(2)})
    assert not target.exists()


PART = {"file": "rank-00000.safetensors", "key": "x", "offsets": [0], "sizes": [2]}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"values": {"y": {"os.system": "true"}}},
        {"values": {"y": {"array": ["O", [1], ""]}}},
        {"values": {"y": {"tensor": {**PART, "file": "../elsewhere/rank-00000.safetensors"}}}},
        {"values": {"y": {"tensor": {**PART, "sizes": [3]}}}},
        {"tensors": {"x": {"shape": [2], "parts": [{**PART, "file": "/etc/passwd"}]}}},
    ],
)
def test_a_forged_index_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    for name in ("one", "elsewhere"):
        folder = tmp_path / name
        write(folder, State({"x": torch.ones(2)}, {"y": 1}))
    folder = tmp_path / "one"
    document = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**document, **change}))
    with pytest.raises(InvalidRun):
        Reader(folder).value("y")
