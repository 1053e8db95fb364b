"""A pattern for a module allows what the module defines, but not what it imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from zbv_worker.errors import InvalidRun
from zbv_worker.model.spec import ModelSpec

SOURCE = """
import os
import subprocess
from functools import partial
from os import system, makedirs
from pathlib import Path
from zbv_worker.models.gpt import gpt
from zbv_worker.models.tiny import tiny as other

class Built:
    def build_stage(self, stage, n_stages, device): ...
    def microbatch(self, step, index): ...
    def loss(self, output, target): ...
    def optimizer(self, parameters): ...
    def __init__(self, seed): ...

def build(seed, **arguments):
    return Built(seed)

def _private(seed, **arguments):
    return Built(seed)

bound = Built(0).loss
some = partial(build, seed=1)
anything = lambda seed: Built(seed)
"""


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    """mypackage.models, which imports functions that others must not call."""
    made = ModuleType("mypackage.models")
    exec(SOURCE, made.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mypackage", ModuleType("mypackage"))
        patch.setitem(sys.modules, "mypackage.models", made)
        yield


def load(name: str, *patterns: str, **arguments: object) -> object:
    return ModelSpec(f"mypackage.models:{name}", arguments, allowed=patterns or ("mypackage.*",)).build()


@pytest.mark.parametrize("name", ["build", "Built"])
@pytest.mark.parametrize("pattern", ["mypackage.*", "mypackage.models", "*", "*:*", "mypackage.models:*"])
def test_names_that_the_module_defines_are_allowed(name: str, pattern: str) -> None:
    assert type(load(name, pattern)).__name__ == "Built"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("system", "it is defined in posix"),
        ("makedirs", "it is defined in os"),
        ("Path", "it is defined in pathlib"),
        ("gpt", r"it is defined in zbv_worker\.models\.gpt"),
        ("other", r"it is defined in zbv_worker\.models\.tiny"),
        ("partial", "it is defined in functools"),
        ("some", "it is defined in functools"),
        ("bound", "it is a method, not a function or class"),
        ("_private", "its name begins with an underscore"),
        ("__class__", "its name begins with an underscore"),
    ],
)
@pytest.mark.parametrize("pattern", ["mypackage.*", "*", "*:*", "mypackage.models:*"])
def test_imported_names_are_refused(name: str, why: str, pattern: str) -> None:
    rule = "allows functions and classes that mypackage.models defines"
    with pytest.raises(InvalidRun, match=f"{rule}, .*{why}.*--allow-model"):
        load(name, pattern)


@pytest.mark.parametrize("name", ["os.system", "subprocess", "os"])
def test_attributes_of_modules_are_not_reachable(name: str) -> None:
    with pytest.raises(InvalidRun, match=r"has no function|is a module; must be a function"):
        load(name)


def test_nothing_is_called_before_it_is_allowed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(InvalidRun, match="it is defined in os"):
        ModelSpec("mypackage.models:makedirs", {"name": str(target)}, allowed=("mypackage.*",)).build()
    assert not target.exists()


def test_a_pattern_that_names_a_callable_allows_it_wherever_it_is_defined() -> None:
    assert load("gpt", "mypackage.models:gpt", layers=2, width=8, heads=2, length=4, characters=100)
    assert load("_private", "mypackage.mod*:_private")
    with pytest.raises(InvalidRun, match="it is defined in zbv_worker"):
        load("other", "mypackage.models:gpt", "mypackage.*")


def test_a_module_that_matches_no_pattern_is_not_imported() -> None:
    spec = ModelSpec("antigravity:build", allowed=("mypackage.*",))
    with pytest.raises(InvalidRun, match="this agent allows mypackage"):
        spec.build()
    assert "antigravity" not in sys.modules


def test_a_command_may_name_any_callable() -> None:
    assert ModelSpec("mypackage.models:some").build()
