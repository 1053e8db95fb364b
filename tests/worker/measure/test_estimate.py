"""Estimates without memory equal measurements."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zbv_models.estimate.config import estimate_layers as advised_layers
from zbv_models.estimate.config import parse_config
from zbv_models.estimate.transformers_config import read_config
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_worker.commands.cli import main
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.measure.estimate.document import Scale, estimated_document
from zbv_worker.measure.estimate.estimate import (
    Estimate,
    count_flops,
    estimate_layers,
    estimate_stages,
    likeness,
)
from zbv_worker.models.gpt import Block, gpt
from zbv_worker.stage.main_gradients import use_main_gradients
from zbv_worker.stage.weight_grads import add_grouped_products, add_product

CPU = torch.device("cpu")
ROWS, WIDTH = 24, 32
GPT = gpt(layers=2, width=48, heads=3, length=24, sequences=2, characters=20_000, dropout=0.1)


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.contract(nn.functional.gelu(self.expand(x)))
        return output


class Pieces:
    """A model of the given layers."""

    def __init__(self, *layers: Any, input: tuple[int, ...] = (2, ROWS // 2, WIDTH)):
        self._layers = layers
        self._input = input

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        first, last = (at * len(self._layers) // n_stages for at in (stage, stage + 1))
        return self.build_layers(self.layer_names()[first:last], device)

    def layer_names(self) -> Sequence[str]:
        return [f"piece.{at}" for at in range(len(self._layers))]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        numbers = [int(name.removeprefix("piece.")) for name in names]
        return nn.Sequential(OrderedDict((f"piece{at}", self._layers[at]()) for at in numbers)).to(device)

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(self._input), torch.randn(self._input)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return square_loss(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    """Replaces PyTorch's loss, whose scalar on a CPU is a view of memory as large as the input."""
    return (output - target).square().mean()


class Twice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Numbered(Mlp):
    """A layer that knows its number, and might depend on it."""

    def __init__(self, number: int):
        super().__init__(WIDTH)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.number != 1 else x.tanh() + super().forward(x)


INNER: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "block": lambda: Block(WIDTH, 4),
    "twice": Twice,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "first": lambda: Numbered(1),
    "second": lambda: Numbered(2),
}


@pytest.fixture(scope="module")
def inner() -> dict[str, Estimate]:
    """The estimates of layers between two others, which take data and have the loss."""
    _, *found, _ = estimate_layers(Pieces(Mlp, *INNER.values(), Mlp))
    return dict(zip(INNER, found, strict=True))


def test_an_mlp_counted_by_hand(inner: dict[str, Estimate]) -> None:
    """F keeps the input, and GELU's input and output; I keeps each Linear's input and output gradient."""
    found = inner["mlp"]
    unit = ROWS * WIDTH * 4
    assert found.kept.memory.after_forward == (1 + 4 + 4) * unit
    assert found.kept.memory.after_input == (1 + 4 + 4 + 1) * unit
    assert found.recomputed is not None
    assert found.recomputed.memory.after_forward == unit
    assert found.recomputed.memory.after_input == found.kept.memory.after_input
    assert found.input_bytes == found.output_bytes == unit
    assert found.parameters == 8 * WIDTH * WIDTH + 5 * WIDTH
    assert found.static.parameters == found.static.gradients == 4 * found.parameters
    assert found.static.optimizer == pytest.approx(8 * found.parameters, rel=0.01)  # Adam and its step counts
    product = 2 * ROWS * 4 * WIDTH * WIDTH
    flops = found.kept.flops
    assert (flops.forward, flops.backward_input, flops.backward_weight) == (2 * product,) * 3
    assert found.recomputed.flops.backward_input == 4 * product


def test_attention_recomputes_its_scores_in_i(inner: dict[str, Estimate]) -> None:
    """2 matrix products in F, 5 in I (FlashAttention, Dao et al. 2022, appendix B), none in W."""
    found = inner["block"].kept.flops
    linear = 2 * ROWS * 12 * WIDTH * WIDTH
    product = 2 * 2 * (ROWS // 2) ** 2 * WIDTH
    assert found.forward == linear + 2 * product
    assert found.backward_input == linear + 5 * product
    assert found.backward_weight == linear


def test_weights_that_are_used_twice_count_twice(inner: dict[str, Estimate]) -> None:
    once, twice = inner["mlp"].kept.flops, inner["twice"].kept.flops
    assert twice.backward_weight == 2 * once.backward_weight


def test_a_layer_that_differs_in_anything_is_estimated_separately(inner: dict[str, Estimate]) -> None:
    assert inner["first"].kept.memory.after_forward > inner["second"].kept.memory.after_forward


def test_recomputation_is_left_out_for_a_layer_that_keeps_only_its_input(inner: dict[str, Estimate]) -> None:
    """A Linear keeps only its input; an MLP keeps more."""
    document = estimated_document([inner["mlp"], inner["linear"]], 1, 1, Scale())
    assert ["recompute" in layer for layer in document["layers"]] == [True, False]


@pytest.fixture(scope="module")
def layers_of_gpt() -> list[Estimate]:
    return list(estimate_layers(GPT))


def test_the_memory_of_layers_adds_up_to_their_stages(layers_of_gpt: list[Estimate]) -> None:
    model = GPT
    layers = {layer.name: layer.kept.memory for layer in layers_of_gpt}
    (whole,) = estimate_stages(model, 1)
    kept = whole.kept.memory
    assert sum(m.after_forward for m in layers.values()) == pytest.approx(kept.after_forward, rel=0.02)
    assert sum(m.after_input for m in layers.values()) == pytest.approx(kept.after_input, rel=0.02)


def test_a_huge_model_needs_no_memory() -> None:
    """36 blocks of 0.8 billion parameters each, of which one is estimated."""
    model = gpt(layers=36, width=8192, heads=64, length=2048, sequences=1, characters=20_000)
    found = list(estimate_layers(model))
    assert sum(layer.parameters for layer in found) > 28e9
    assert len({layer.kept for layer in found}) == 3


# --- likeness of layers


class Applying(nn.Module):
    """Has an attribute whose state cannot be compared."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function


def alike(first: nn.Module, second: nn.Module) -> bool:
    x = torch.ones(1)
    return likeness(first, x, 0) == likeness(second, x, 0)


def test_modules_are_alike_if_classes_settings_and_shapes_are_equal() -> None:
    assert alike(Mlp(), Mlp())
    assert alike(nn.Sequential(OrderedDict(a=Mlp())), nn.Sequential(OrderedDict(b=Mlp())))
    assert not alike(Mlp(8), Mlp(16))
    assert not alike(nn.Dropout(0.1), nn.Dropout(0.2))
    assert not alike(Mlp(), Mlp().eval())
    assert not alike(nn.LayerNorm(8), nn.RMSNorm(8))
    assert alike(Applying(torch.tanh), Applying(torch.tanh))
    assert not alike(Applying(torch.tanh), Applying(torch.exp))
    tied = Mlp()
    tied.contract.bias = nn.Parameter(torch.ones(WIDTH))
    assert alike(tied, Mlp())
    twins = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    twins[1][1].weight = twins[1][0].weight
    assert not alike(*twins)
    frozen = Mlp()
    frozen.expand.weight.requires_grad_(False)
    assert not alike(frozen, Mlp())
    hooked = Mlp()
    hooked.register_forward_hook(lambda *_: None)
    assert not alike(hooked, Mlp())


# --- refusals


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["piece.0", "piece.0"], r"layer 1 is 'piece\.0' again; every layer needs a unique"),
        (["piece.0", ""], r"layer 1 is ''; every layer needs a unique"),
        ([], r"layer_names of a Named is empty"),
    ],
)
def test_layers_need_unique_names(names: list[str], message: str) -> None:
    class Named(Pieces):
        def layer_names(self) -> Sequence[str]:
            return names

    with pytest.raises(ModelError, match=message):
        list(estimate_layers(Named(Mlp, Mlp)))


def test_a_model_without_data_is_refused_by_name() -> None:
    class Lost(Pieces):
        def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
            raise FileNotFoundError("no text here")

    with pytest.raises(InvalidRun, match=r"microbatch\(0, 0\) raised FileNotFoundError: no text here"):
        list(estimate_layers(Lost(Mlp)))


# --- documents and the command


def test_equal_layers_are_written_once_and_keep_their_names(layers_of_gpt: list[Estimate]) -> None:
    model, layers = GPT, layers_of_gpt
    document = estimated_document(layers, 2, 8, Scale(teraflops=2.0, latency=3.0, bandwidth=0.5))
    written = [(layer["name"], layer.get("repeat")) for layer in document["layers"]]
    assert written == [("embedding", None), ("block", 2), ("head", None)]
    problem: Any = parse_any_problem(document)
    assert problem.placement == "auto"
    assert list(problem.model.names) == list(model.layer_names())
    block, found = layers[1], document["layers"][1]
    assert found["forward"] == pytest.approx(block.kept.flops.forward / 2e12 * 1e6)
    assert found["memory"]["forward"] + found["memory"]["backward_input"] == block.kept.memory.after_input
    assert block.recomputed is not None
    assert found["recompute"]["memory"]["forward"] == block.recomputed.memory.after_forward
    assert problem.link is not None
    assert problem.link.transfer(500) == pytest.approx(3.0 + 500 / 0.5e9 * 1e6)


@pytest.mark.parametrize(
    ("kinds", "written"),
    [
        ((Mlp, Mlp, Mlp, Mlp), [("piece.0", None), ("piece.1", None), ("piece.2", None), ("piece.3", None)]),
        ((Mlp,), [("piece.0", None)]),
    ],
)
def test_copies_have_numbers_or_names(kinds: tuple[Any, ...], written: list[tuple[str, int | None]]) -> None:
    """The first layer takes data, so it differs from the next, and no run of equal layers begins at 0."""
    document = estimated_document(list(estimate_layers(Pieces(*kinds))), 1, 1, Scale())
    assert [(layer["name"], layer.get("repeat")) for layer in document["layers"]] == written
    assert document["memory"]["static"] == 0  # one rank receives nothing


ARGUMENTS = {"layers": 2, "width": 16, "heads": 2, "length": 8, "sequences": 1, "characters": 20_000}


def test_the_command_writes_a_problem_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model has tied ends, which are planned on one rank."""
    arguments = json.dumps({**ARGUMENTS, "tied": True})
    command = ["estimate", "zbv_worker.models.gpt:gpt", "--model-args", arguments]
    written = ["-o", str(tmp_path / "problem.json"), "--report", str(tmp_path / "report.json")]
    assert main([*command, "--pp-degree", "2", "--tflops", "1.5", *written]) == 0
    problem: Any = parse_any_problem(json.loads((tmp_path / "problem.json").read_text()))
    assert (problem.pp_degree, problem.microbatches, problem.units.time) == (2, 8, "us")
    assert problem.placement == "v"
    assert "block.0 … block.1" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [layer["name"] for layer in report["layers"]][-1] == "head"
    assert len(report["stages"]) == 4
    assert report["layers"][1]["kept"]["memory"]["after_forward"] > 0


def test_a_model_without_layers_gives_a_problem_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["estimate", "zbv_worker.models.tiny:tiny", "--model-args", '{"width": 64, "rows": 16}']
    assert main([*tiny, "--pp-degree", "2", "--microbatches", "6", "-o", "-"]) == 0
    streams = capsys.readouterr()
    problem = parse_problem(json.loads(streams.out))
    assert "Stages" in streams.err
    assert (problem.units.time, problem.units.memory) == ("GFLOP", "bytes")
    assert (problem.n_stages, problem.microbatches) == (4, 6)
    assert problem.costs.forward == (2 * 16 * 64 * 64 / 1e9,) * 4
    assert problem.memory.forward[1] == 16 * 64 * 4
    assert problem.memory.static[1] > problem.memory.forward[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zbv_worker.models.tiny:tiny"], "without layers.*Pass --pp-degree or --stages"),
        (["zbv_worker.models.gpt:gpt", "-o", "x.json"], "--output: a problem needs a number of ranks"),
        (["zbv_worker.models.gpt:gpt", "--pp-degree", "2", "--latency", "3"], "--latency: without --tflops"),
        (["nowhere.at:all"], "found no module 'nowhere'"),
        (["mine.py:all"], "found 'mine.py:all'; must name a module, not a file: mine:all"),
        (
            ["zbv_worker.models.gpt:gpt", "--model-args", '{"deep": 3}'],
            "TypeError: .* keyword argument 'deep'",
        ),
        (
            ["zbv_worker.models.gpt:gpt", "--model-args", '{"heads": 7}', "--seed", "5"],
            r"the factory, called with seed=5, heads=7, failed: ValueError: found .*heads must "
            r"divide width \(gpt\.py:\d+\)\. Check --model-args",
        ),
        (["collections:OrderedDict"], "the factory returned a OrderedDict, which has layers but no data"),
        (["zbv_worker.models.tiny:tiny", "--stages", "1", "--report", "no/where"], "no/where: No such"),
    ],
)
def test_wrong_arguments_give_a_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_blocks_and_groups_of_a_product_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is in float32 and the factors in half precision, so a CPU computes blocks of rows."""
    monkeypatch.setattr("zbv_worker.stage.weight_grads._BLOCK_ELEMENTS", 64)

    def counted(is_fake: bool) -> list[int]:
        with FakeTensorMode() if is_fake else nullcontext():
            left, right = torch.ones(24, 40).bfloat16(), torch.ones(24, 16).bfloat16()
            one, groups = (nn.Parameter(torch.zeros(size).bfloat16()) for size in ((40, 16), (3, 40, 16)))
            use_main_gradients([one, groups])
            ends = torch.tensor([8, 16, 24])
            return [
                count_flops(lambda: add_product(one, left.t(), right)),
                count_flops(lambda: add_product(one, left.t(), right)),
                count_flops(lambda: add_grouped_products(groups, left, right, ends)),
            ]

    assert counted(is_fake=True) == counted(is_fake=False) == [2 * 24 * 40 * 16] * 3


UNTRAINED = {
    "model_type": "falcon_h1", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "mamba_n_heads": 8,
    "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 32,
}  # fmt: skip


def test_channels_of_a_convolution_count_within_their_group() -> None:
    layer, given = nn.Conv1d(8, 8, 3, groups=8), torch.randn(2, 8, 16, requires_grad=True)
    assert count_flops(lambda: layer(given).sum().backward()) == 3 * 2 * 2 * 14 * 8 * 3


def test_a_type_that_the_worker_does_not_train_is_estimated_as_by_the_advisor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report, output = (tmp_path / name for name in ("config.json", "report.json", "problem.json"))
    path.write_text(json.dumps(UNTRAINED))
    sizes = json.dumps({"sequence_length": 64, "sequences": 2})
    command = ["estimate", f"transformers:{path}", "--model-args", sizes]
    written = ["--pp-degree", "2", "--tflops", "100", "--report", str(report), "-o", str(output)]
    assert main([*command, *written]) == 0
    assert "FalconH1ForCausalLM" in capsys.readouterr().err
    read = {**read_config(UNTRAINED, 64), "microbatch_size": 2}
    device, parallel = {"achieved_tflops": 1.0}, {"pp_degree": 1, "microbatches": 1, "placement": "single"}
    config = parse_config({"model": read, "parallel": parallel, "device": device})
    expected = [layer for layer in advised_layers(config) for _ in layer.names]
    layers = json.loads(report.read_text())["layers"]
    assert len(layers) == len(expected) == 5
    for found, layer in zip(layers, expected, strict=True):
        assert found["parameters"] == layer.parameters
        assert found["kept"]["flops"]["backward_input"] == int(layer.flops.backward_input)
        assert found["kept"]["memory"]["after_forward"] == layer.plain.after_forward
        # Parameters and two moments of 2 bytes each, and gradients in float32.
        assert found["static_total"] == 10 * layer.parameters
    assert isinstance(parse_any_problem(json.loads(output.read_text())), LayeredProblem)
    assert main([*command, "--stages", "4"]) == 2
    assert "--stages" in capsys.readouterr().err


def test_wrong_arguments_of_an_untrained_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**UNTRAINED, "model_type": "wormhole"}))
    assert main(["estimate", f"transformers:{path}"]) == 2
    assert "wormhole" in capsys.readouterr().err
    path.write_text(json.dumps(UNTRAINED))
    assert main(["estimate", f"transformers:{path}", "--model-args", '{"sequences": 0}']) == 2
    assert "microbatch_size" in capsys.readouterr().err
