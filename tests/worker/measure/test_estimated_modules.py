"""Modules as people write them: estimated within two percent, or refused with what is in the way.

All give their output in one piece, as each is the layer after another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from support.functions import Function
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from worker.measure.test_estimate import Pieces
from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.estimate import Estimate, estimate_layers
from zbv_worker.measure.estimate.without_memory import built
from zbv_worker.measure.stage_memory import stage_memory
from zbv_worker.models.gpt import Block
from zbv_worker.stage.program import AUTOCAST, Precision, Program
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
SEQUENCES, LENGTH, WIDTH, HEADS = 2, 16, 32, 4


def made_of(run: Callable[[Any, Tensor], Any], **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Makes a module with these attributes and this forward."""
    return lambda: Function(run, **{name: make() for name, make in parts.items()})


def linear(width: int = WIDTH, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(WIDTH, width, **options)


def in_heads(x: Tensor) -> Tensor:
    return x.view(SEQUENCES, LENGTH, -1, WIDTH // HEADS).transpose(1, 2)


def out_of_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(SEQUENCES, LENGTH, WIDTH)


def rotated(self: Any, x: Tensor) -> Any:
    """Rotary positions, as complex numbers."""
    query, key, value = map(in_heads, self.query_key_value(x).chunk(3, -1))

    def turned(these: Tensor) -> Tensor:
        pairs = torch.view_as_complex(these.float().reshape(*these.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    mixed = nnf.scaled_dot_product_attention(turned(query), turned(key), value.float(), is_causal=True)
    return self.back(out_of_heads(mixed))


def with_scores(self: Any, x: Tensor) -> Tensor:
    """Attention by hand, with a mask that is a buffer."""
    query, key, value = map(in_heads, self.query_key_value(x).chunk(3, -1))
    scores = (query @ key.transpose(-1, -2)).masked_fill(self.mask, float("-inf"))
    return out_of_heads(self.dropout(scores.softmax(-1)) @ value)


def few_keys(self: Any, x: Tensor) -> Tensor:
    query, (key, value) = in_heads(self.query(x)), map(in_heads, self.key_value(x).chunk(2, -1))
    return out_of_heads(nnf.scaled_dot_product_attention(query, key, value, enable_gqa=True))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * 2 * x


def in_half(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = self.linear(x)
    return self.norm(hidden.float())


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pair[2].weight = pair[0].weight
    return pair


def of_unit_norm() -> nn.Module:
    """Reads its initial values, so it needs memory when it is built."""
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight /= float(layer.weight.norm())
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
    ),
    "in place": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "gate": made_of(
        lambda s, x: x + s.down(nnf.silu(s.gate(s.norm(x))) * s.up(s.norm(x))),
        gate=linear(64, bias=False),
        up=linear(64, bias=False),
        down=lambda: nn.Linear(64, WIDTH),
        norm=lambda: nn.RMSNorm(WIDTH),
    ),
    "complex buffer": made_of(
        rotated,
        query_key_value=linear(3 * WIDTH),
        back=linear(),
        turns=lambda: nn.Buffer(torch.polar(torch.ones(LENGTH, 4), torch.ones(LENGTH, 4))),
    ),
    "scores": made_of(
        with_scores,
        query_key_value=linear(3 * WIDTH),
        mask=lambda: nn.Buffer(torch.ones(LENGTH, LENGTH).triu(1).bool()),
        dropout=lambda: nn.Dropout(0.1),
    ),
    "few keys": made_of(few_keys, query=linear(), key_value=linear(WIDTH)),
    "torch's attention": made_of(
        lambda s, x: s.attention(x, x, x)[0].contiguous(),
        attention=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    ),
    "function": made_of(lambda s, x: s.linear(Square.apply(x)), linear=linear()),  # type: ignore[no-untyped-call]
    "convolution": made_of(
        lambda s, x: s.convolution(x.transpose(1, 2)).transpose(1, 2).contiguous(),
        convolution=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    ),
    "embedding": made_of(
        lambda s, x: x + s.table(torch.zeros(LENGTH, dtype=torch.long, device=x.device)),
        table=lambda: nn.Embedding(9, WIDTH),
    ),
    "checkpoint": made_of(
        lambda s, x: checkpoint(s.block, x, use_reentrant=False), block=lambda: Block(WIDTH, HEADS, 0.1)
    ),
    "autocast": made_of(in_half, linear=linear(), norm=lambda: nn.LayerNorm(WIDTH)),
    "half parameters": made_of(
        lambda s, x: s.linear(x.bfloat16()).to(x.dtype), linear=linear(dtype=torch.bfloat16)
    ),
    "tied": tied,
    "frozen": made_of(
        lambda s, x: s.large(x) + s.back(s.small(x)),
        large=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        small=linear(2),
        back=lambda: nn.Linear(2, WIDTH),
    ),
    "tensors in lists": made_of(
        lambda s, x: x * s.factors[0] * s.named["second"],
        factors=lambda: [torch.ones(WIDTH)],
        named=lambda: {"second": torch.ones(WIDTH)},
    ),
    "values at birth": of_unit_norm,
}


IN_HALF = ("gate", "complex buffer", "checkpoint")


def model_of(*layers: Callable[[], nn.Module]) -> Pieces:
    ends = linear()
    return Pieces(ends, *layers, ends, input=(SEQUENCES, LENGTH, WIDTH))


@pytest.fixture(scope="module")
def estimates() -> dict[tuple[str, Precision], Estimate]:
    """The estimates of all modules as layers of one model, and of some in mixed precision."""
    found: dict[tuple[str, Precision], Estimate] = {}
    precisions: tuple[tuple[Precision, Sequence[str]], ...] = (
        ("float32", list(MODULES)),
        ("bfloat16", IN_HALF),
    )
    with warnings.catch_warnings(action="ignore"):  # torch's advice on modules
        for precision, names in precisions:
            _, *layers, _ = estimate_layers(model_of(*(MODULES[name] for name in names)), Program(precision))
            found |= {(name, precision): layer for name, layer in zip(names, layers, strict=True)}
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "float32") for name in MODULES), *((name, "bfloat16") for name in IN_HALF)],
)
def test_modules_are_estimated_within_two_percent(
    name: str, precision: Precision, estimates: dict[tuple[str, Precision], Estimate]
) -> None:
    found = estimates[name, precision]
    module = MODULES[name]().train()
    x = torch.randn(SEQUENCES, LENGTH, WIDTH)
    x = x.bfloat16() if found.input_bytes < x.nbytes else x  # like the output of the previous layer
    for is_recomputed, walked in ((False, found.kept), (True, found.recomputed)):
        assert walked is not None
        stage = Stage(1, 3, module, 1, None, AUTOCAST[precision], is_recomputed=is_recomputed)
        gradient = torch.randn_like(stage.forward(0, x, split=False))
        stage.backward(0, gradient)
        held = stage_memory(stage, x, None, gradient, CPU)
        memory = walked.memory
        assert memory.after_forward == pytest.approx(held.after_forward, rel=0.02)
        assert memory.after_input == pytest.approx(held.after_input, rel=0.02)
        assert memory.after_weight == held.after_weight == 0
        assert memory.workspace == pytest.approx(held.workspace, rel=0.02)


def choose(self: Any, x: Tensor) -> Tensor:
    output = torch.zeros_like(x)
    output[x > 0] = x[x > 0]
    return output


MEASURE = "Measure this model instead: `zbv-worker profile`"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a choice": (made_of(choose), rf"piece\.1 depends on the values .* {MEASURE}"),
    "an LSTM": (
        made_of(lambda s, x: s.cells(x)[0], cells=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        rf"piece\.1 uses aten\.mkldnn_rnn_layer.*, which keeps memory of unknown size .* {MEASURE}",
    ),
    "numpy": (
        made_of(lambda s, x: x + torch.from_numpy(x.detach().numpy())),
        r"piece\.1 raised RuntimeError: \.numpy\(\) .* \(test_estimated_modules\.py:\d+\).*, measure this",
    ),
    "two tensors": (made_of(lambda s, x: (x, x)), r"piece\.2 raised TypeError: .*3 were given"),
    "no value": (made_of(lambda s, x: {x}), r"piece\.1: stage 1: found a set between stages"),
    "its input": (
        made_of(lambda s, x: x.relu_()),
        r"piece\.1: stage 1: a LayerSequence modified its input, from which the layer is recomputed",
    ),
    "sparse": (
        made_of(
            lambda s, x: x + s.table(torch.zeros(LENGTH, dtype=torch.long, device=x.device)),
            table=lambda: nn.Embedding(9, WIDTH, sparse=True),
        ),
        r"piece\.1 raised RuntimeError: Adam does not support sparse gradients",
    ),
    "a mistake": (
        lambda: nn.Linear(7, 7),
        r"piece\.1 raised RuntimeError: .*\[32, 32\] X \[7, 7\]\. If that is because",
    ),
    "a mistake at birth": (
        made_of(lambda s, x: x, table=lambda: dict[str, int]()["nothing"]),
        r"building piece\.1 raised KeyError: 'nothing' \(test_estimated_modules\.py:\d+\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_modules_are_refused_with_name_and_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, message = REFUSED[name]
    with pytest.raises(InvalidRun, match=message):
        list(estimate_layers(model_of(make)))
    assert not caplog.records


def test_a_module_that_gets_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    devices: list[str] = []

    def build(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        devices.append(device.type)
        with device:
            return make()

    def broken() -> nn.Module:
        raise ValueError("found no width")

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    built("head", partial(build, of_unit_norm), mode)
    assert "head reads its initial values, so it gets memory" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no width"):
        built("head", partial(build, broken), mode)
    assert devices == ["meta", "cpu", "meta"]
