"""Compiled layers have the gradients of uncompiled ones, with F, I and W as well as with F and B."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as nnf
from support.functions import Function
from support.gradients import relative_error
from support.nested_model import WIDTH as MIXED
from support.nested_model import MaskedMix, NestedModel
from support.stages import backward, forth_and_back
from torch import Tensor, nn
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.run.options import TrainingOptions, require_compilable
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.program import AUTOCAST, Precision
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import gradient_of

WIDTH, TOKENS = 16, 12
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own


class Block(nn.Module):
    """Norm, attention with a shared projection, dropout, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        key, value = self.project(self.norm(x)), self.project(x)
        x = x + nnf.scaled_dot_product_attention(key, key, value)
        return x + self.dropout(self.down(nnf.gelu(self.up(x))))


class Dropping(nn.Module):
    """A small layer, because it takes seconds to generate code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return x + self.dropout(self.linear(x))


def gradients(
    module: nn.Module, *, is_compiled: bool, split: bool, index: int = 1, precision: Precision = "float32"
) -> dict[str, Tensor]:
    """The gradients of three microbatches, and the last input's gradient."""
    module = copy.deepcopy(module)
    use_main_gradients(module.parameters())
    layers = tuple(module) if isinstance(module, nn.Sequential) else None
    stage = Stage(index, 3, module, 1, autocast=AUTOCAST[precision], layers=layers, is_compiled=is_compiled)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(11)
    found: dict[str, Tensor] = {}
    for microbatch in range(3):
        if index:
            x = torch.randn(2, TOKENS, WIDTH, generator=generator)
        else:
            x = torch.randint(20, (2, TOKENS), generator=generator)
        output = stage.forward(microbatch, x, split=split)
        seed = torch.randn(output.shape, generator=generator).to(output.dtype)
        input_gradient = backward(stage, seed, split=split, microbatch=microbatch)
        if input_gradient is not None:
            found["input"] = input_gradient
    for name, parameter in module.named_parameters():
        gradient = gradient_of(parameter)
        assert gradient is not None, name
        found[name] = gradient
    if split and is_compiled:
        assert stage.split_share == stage.expected_share
    return found


def require_equal(module: nn.Module, **how: Any) -> None:
    mine, expected = (gradients(module, is_compiled=is_compiled, **how) for is_compiled in (True, False))
    assert relative_error(mine, expected) < (3e-2 if how.get("precision") == "bfloat16" else 1e-5)


QUICKLY = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
"""Torch would start a process per core, try vector instructions in programs, and compile all headers."""


def test_generated_code_has_the_gradients_of_uncompiled_layers() -> None:
    """With the same random numbers for dropout. Layers of equal code share one compilation."""
    with inductor.patch(QUICKLY):
        require_one_compilation(Dropping, split=True)


@pytest.mark.usefixtures("compiled_without_code")
@pytest.mark.parametrize(("precision", "split"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_compiled_blocks_have_the_gradients_of_others(precision: Precision, split: bool) -> None:
    require_one_compilation(Block, split=split, precision=precision)


def require_one_compilation(layer: Callable[[], nn.Module], **how: Any) -> None:
    torch._dynamo.reset()
    before = compilations()
    require_equal(nn.Sequential(layer(), layer()), **how)
    assert compilations() == before + 1


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("compiled_without_code")
def test_the_first_stage_splits_its_embedding_too() -> None:
    first = Function(
        lambda self, indices: self.mix(self.table(indices)),
        table=nn.Embedding(20, WIDTH, padding_idx=3),
        mix=nn.Linear(WIDTH, WIDTH),
    )
    require_equal(first, split=True, index=0)


@pytest.mark.usefixtures("compiled_without_code")
def test_a_parameter_that_gets_a_hook_is_no_longer_left_to_w() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    stage = Stage(1, 3, module, 1, is_compiled=True)
    called: list[int] = []
    for microbatch in range(4):
        if microbatch == 2:
            module.weight.register_hook(lambda gradient: called.append(len(gradient)))  # type: ignore[no-untyped-call]
        stage.forward(microbatch, torch.ones(1, WIDTH), split=True)
        stage.backward_input(microbatch, torch.ones(1, WIDTH))
        assert len(called) == max(0, microbatch - 1), "I computes the gradient of a parameter with hooks"
        stage.backward_weight(microbatch)
    torch.testing.assert_close(module.weight.grad, torch.full((WIDTH, WIDTH), 4.0))


@pytest.mark.usefixtures("compiled_without_code")
def test_a_layer_of_nested_values_with_a_keyword_and_a_loss_computes_the_same() -> None:
    data = NestedModel().microbatch(0, 0)
    x = torch.rand(2, 4, MIXED, requires_grad=True), torch.rand(2, MIXED, requires_grad=True)
    given = (*x, torch.rand(4), data.input["words"] % 2, None)
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        layer = MaskedMix(weight=0.3)
        stage = Stage(1, 3, layer, 1, is_compiled=is_compiled)
        before = compilations()
        for j in range(2):  # the first runs uncompiled
            output = stage.forward(j, given, split=True, keywords=data.keywords)
            assert [tensor.requires_grad for tensor in output[:4]] == [True, True, False, False]
            assert output[4] is None
            results = backward(stage, (torch.ones(2, 4, MIXED), torch.ones(2, MIXED)), microbatch=j)
        assert (compilations() > before) == is_compiled
        named = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        found.append({**named, **dict(zip("xy", results, strict=True)), "sum": stage.auxiliary.take_sum()})
    assert relative_error(found[1], found[0]) < 1e-6


class Fickle(nn.Module):
    """A layer that calls its Linear once, and twice later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(x)
        return x


@pytest.mark.usefixtures("compiled_without_code")
def test_a_layer_must_call_its_linears_alike_for_every_microbatch() -> None:
    module = Fickle()
    module.times = 2
    stage = Stage(1, 3, module, 1, is_compiled=True)
    stage.forward(0, torch.ones(1, WIDTH), split=True)
    module.times = 1
    with pytest.raises(ModelError, match="a Fickle called 1 Linears and Embeddings, and 2 for"):
        stage.forward(1, torch.ones(1, WIDTH), split=True)


def test_what_cannot_be_compiled_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor) -> Tensor:
        raise torch._dynamo.exc.TorchDynamoException("no such operator\nand a long log")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    stage = Stage(1, 3, Block(), 1, is_compiled=True)
    stage.forward(0, torch.ones(1, WIDTH), split=False)  # the first one runs uncompiled
    with pytest.raises(ModelError, match=r"compile failed for a Block: no such operator\. Correct"):
        stage.forward(1, torch.ones(1, WIDTH), split=False)


def test_recomputed_stages_and_evaluations_run_uncompiled() -> None:
    before = compilations()
    stage = Stage(1, 3, Block(), 1, is_recomputed=True, is_compiled=True)
    x = torch.ones(1, TOKENS, WIDTH)
    forth_and_back(stage, x, x)
    stage.evaluate(x)
    assert compilations() == before


def test_a_run_refuses_to_compile_sharded_stages() -> None:
    with pytest.raises(InvalidRun, match=r"--compile does not support --shard"):
        require_compilable(TrainingOptions(is_compiled=True, is_sharded=True))
