"""Control messages are JSON: nothing that a peer sends can run code."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.pickled import Bomb
from support.thread_transport import ThreadHub
from torch import Tensor
from zbv_worker.transport.gloo_control import MAX_BYTES, gather_json


def with_peer(theirs: bytes, announced: int | None = None) -> Callable[[Tensor], Sequence[Tensor]]:
    """A gather of two ranks; the second one sends these bytes."""

    def gather(mine: Tensor) -> Sequence[Tensor]:
        if mine.dtype == torch.int64:
            return mine, torch.tensor([len(theirs) if announced is None else announced])
        padded = torch.zeros_like(mine)
        padded[: len(theirs)] = torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
        return mine, padded

    return gather


@pytest.mark.parametrize("theirs", [None, 1.5, "é" * 100, [1, [True, {"x": -(2**63)}]]])
def test_json_of_any_length_comes_back(theirs: Any) -> None:
    mine = {"shape": [1, 2], "nothing": None}
    assert gather_json(mine, with_peer(json.dumps(theirs).encode())) == [mine, theirs]


def test_a_pickled_message_runs_no_code_and_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "made"
    bomb = pickle.dumps(Bomb(target))
    with pytest.raises(ValueError, match="the message of rank 1 is not JSON"):
        gather_json({}, with_peer(bomb))
    assert not target.exists()
    pickle.loads(bomb)  # unpickled, it does run
    assert target.exists()


@pytest.mark.parametrize("announced", [0, -1, MAX_BYTES + 1, 2**62])
def test_a_too_long_message_is_refused_before_allocation(announced: int) -> None:
    with pytest.raises(ValueError, match="rank 1 sent a message of"):
        gather_json({}, with_peer(b"1", announced))


@pytest.mark.parametrize("theirs", [b"[" * 100_000, b"\xff\xff", b"{'a': 1}"])
def test_messages_that_are_not_json_are_refused(theirs: bytes) -> None:
    with pytest.raises(ValueError, match="the message of rank 1 is not JSON"):
        gather_json({}, with_peer(theirs))


def test_threads_exchange_only_json() -> None:
    """The transport of the tests must refuse what the real one refuses."""
    alone = ThreadHub(1).transport(0)
    assert alone.gather({"pair": (1, 2)}, 1.0) == [{"pair": [1, 2]}]
    with pytest.raises(TypeError):
        alone.gather({"path": Path()}, 1.0)


UNSAFE_CALLS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
WORDS = {*UNSAFE_CALLS, *UNSAFE_MODULES, "torch.load"}


def unsafe(tree: ast.AST) -> list[str]:
    """The names in a module that unpickle data of other programs."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found += [node.module or ""] if (node.module or "").split(".")[0] in UNSAFE_MODULES else []
            found += [name for name in names if name in UNSAFE_CALLS]
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_CALLS:
            found.append(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
                for keyword in node.keywords
            )
            found += [] if safe else ["torch.load"]
    return found


OWN_CHILDREN = {"service/zbv_service/compute/child.py"}
"""Modules that pickle for their own child process, as multiprocessing does anyway."""


@pytest.mark.parametrize("package", ["worker", "service"])
def test_no_module_unpickles(package: str) -> None:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        # To parse all modules takes seconds, and few have such a word.
        if any(word in text for word in WORDS) and (names := unsafe(ast.parse(text))):
            found[str(path.relative_to(ROOT))] = names
    assert found.keys() <= OWN_CHILDREN


def test_the_search_for_unpickling_finds_it() -> None:
    lines = ["import pickle", "from x import gather_object", "dist.all_gather_object(a, b)", "torch.load(f)"]
    assert [len(unsafe(ast.parse(line))) for line in lines] == [1, 1, 1, 1]
    assert unsafe(ast.parse("torch.load(f, weights_only=True)")) == []
