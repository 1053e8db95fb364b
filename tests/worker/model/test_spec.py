"""A command's model: which factories are found, and how a wrong one is answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def mymodel() -> Iterator[None]:
    made = ModuleType("mymodel")
    exec(SOURCE, made.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mymodel", made)
        yield


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
        (
            "mymodel:needs",
            {},
            r"called with no arguments: missing a required argument: 'width'\. .*--model-args",
        ),
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
