"""A command's model: which factories are found and allowed, and how a wrong one is answered."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.model.spec import ModelSpec

SOURCE = """
import torch
from torch import nn
from zbv_worker.model import Model

def build(width=4):
    data = [(torch.randn(width), torch.randn(width)) for _ in range(3)]
    return Model([nn.Linear(width, width)] * 2, loss=nn.functional.mse_loss, data=data, samples=2)

def seeded(seed, width=4):
    return build(width + seed)

def needs(width): return build(width)
def layers(): return [nn.Linear(2, 2)]
def sequential(): return nn.Sequential(nn.Linear(2, 2))
def number(): return 3
def fails(): raise ValueError("no such file")
made = build()
module = nn.Sequential()
"""


IMPORTING = """
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
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """mymodel, and mypackage.models, which imports functions that others must not call."""
    for name, source in (("mymodel", SOURCE), ("mypackage", ""), ("mypackage.models", IMPORTING)):
        made = ModuleType(name)
        exec(source, made.__dict__)
        monkeypatch.setitem(sys.modules, name, made)


def build(name: str, seed: int = 0, **arguments: Any) -> PipelineModel:
    return ModelSpec(name, arguments, seed).build()


def test_a_factory_need_not_take_a_seed_and_is_seeded_anyway() -> None:
    inputs = [build("mymodel:build", seed).microbatch(0, 0)[0] for seed in (1, 1, 2)]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0], inputs[2])
    assert build("mymodel:seeded", 3).microbatch(0, 0)[0].shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("mymodel", {}, "must be package.module:factory, or transformers:PATH"),
        ("mymodel:built", {}, "no function 'built'. Did you mean mymodel:build?"),
        ("mymodel:made", {}, "mymodel.made is a Model; must be a function"),
        ("mymodel:module", {}, "mymodel.module is a Sequential; must be a function"),
        ("mymodel:needs", {}, r"called with no arguments: missing .* argument: 'width'\. .*--model-args"),
        ("mymodel:build", {"depth": 3}, "called with depth=3: got an unexpected keyword argument 'depth'"),
        ("mymodel:fails", {}, "failed: ValueError: no such file"),
        ("mymodel:layers", {}, r"returned a list, which has layers but no data\. Return zbv_worker.Model"),
        ("mymodel:sequential", {}, "returned a Sequential, which has layers but no data"),
        ("mymodel:number", {}, "returned a int without build_stage, microbatch, loss, optimizer"),
        ("transformers:/nowhere", {}, "/nowhere"),
        ("transformers:/nowhere", {"source": "x"}, "Omit 'source'"),
    ],
)
def test_a_wrong_model_is_answered_with_the_remedy(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRun, match=said):
        build(name, **arguments)


def test_a_module_that_fails_is_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidRun, match=r"importing broken_module failed: .*\(broken_module.py:2\)"):
        build("broken_module:build")


@pytest.mark.parametrize(
    ("patterns", "arguments", "is_allowed"),
    [
        (("*",), {}, False),
        (("*:*",), {}, False),
        (("transformers",), {}, False),
        (("transformers:*",), {}, True),
        (("transformers:/models/*",), {}, True),
        (("transformers:/other/*",), {}, False),
        (("transformers:/models/*",), {"data": "/etc/passwd"}, False),
        (("transformers:/models/*",), {"data": "/models/text"}, True),
        (("transformers:/models/*",), {"data": "/models/../etc/passwd"}, False),
    ],
)
def test_agents_read_files_only_by_an_explicit_pattern(
    patterns: tuple[str, ...], arguments: dict[str, Any], is_allowed: bool
) -> None:
    spec = ModelSpec("transformers:/models/none", arguments, allowed=patterns)
    with pytest.raises(InvalidRun) as found:  # there is no such folder
        spec.build()
    assert ("this agent allows" not in str(found.value)) is is_allowed
    if not is_allowed:
        assert "--allow-model 'transformers:/" in str(found.value)


# --- a pattern for a module allows what the module defines, but not what it imports


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
