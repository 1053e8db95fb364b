"""Plans on PyTorch's own pipelining runtime: the gradients of one process, and its known traps."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gradients import relative_error
from support.paths import TESTS
from support.plans import unit_problem, write_plan
from support.selfcheck import Gradients, HardModel, hard_model, random_orders, reference_gradients
from support.torch_lists import torch_runtime
from torch import Tensor, nn
from zbv_solver.construct.baselines import baseline
from zbv_solver.export import export
from zbv_solver.export.torch_comms_csv import lowered
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.stage.weight_grads import WeightGrads

from benchmarks.worker.torch_runtime.executor import TorchExecutor, check, load, refuse_compiled

TOLERANCE = 1e-5
MICROBATCHES = 5
CPU = torch.device("cpu")
GPT = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}


def cases() -> Iterator[tuple[str, Problem, Orders]]:
    """Plans of two ranks: split, fused, both, other placements, and microbatches in any order."""
    v, loop = unit_problem(2, MICROBATCHES), unit_problem(2, MICROBATCHES, "loop")
    plan = search(v, SearchOptions(effort="quick"))
    yield "searched-v", plan.problem, plan.orders
    yield ("1f1b", *baseline("1f1b", v))
    yield ("interleaved-1f1b", *baseline("interleaved-1f1b", v))
    yield "v-fused", v, random_orders(v, Random(1), 1.0)
    yield "v-scattered", v, random_orders(v, Random(4), 0.2)
    yield "loop-mixed", loop, random_orders(loop, Random(2), 0.4)


NAMES = ["searched-v", "1f1b", "interleaved-1f1b", "v-fused", "v-scattered", "loop-mixed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradients of every case, from the lists in memory and from both exported files."""
    folder = tmp_path_factory.mktemp("torch")
    for name, problem, orders in cases():
        write_plan(folder / f"{name}.plan.json", problem, orders)
        plan = make_plan(problem, orders, method="test")
        (folder / f"{name}.compute_only.csv").write_text(export(plan, "torch-csv"))
        (folder / f"{name}.compute_comms.csv").write_text(export(plan, "torch-comms-csv"))
    commands = (
        python_command("support.selfcheck", str(folder), "60", "torch"),
        python_command("support.run_csv", str(folder)),
    )
    search_path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    for command in commands:
        with LocalRanks([command] * 2, folder / "logs", {"PYTHONPATH": search_path}) as ranks:
            ranks.wait(timeout=120)
    return folder


def gradients_in(folder: Path, name: str) -> Gradients:
    found: Gradients = {}
    for rank in range(2):
        found |= torch.load(folder / f"{name}.{rank}.pt")
    return found


@pytest.fixture(scope="module")
def reference() -> tuple[Gradients, float]:
    return reference_gradients(hard_model(), MICROBATCHES)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_compute_the_gradients_of_one(
    folder: Path, reference: tuple[Gradients, float], name: str
) -> None:
    gradients, loss = reference
    assert relative_error(gradients_in(folder, name), gradients) <= TOLERANCE
    losses: dict[str, float] = {}
    for rank in range(2):
        losses |= json.loads((folder / f"{name}.{rank}.json").read_text())["losses"]
    assert sum(losses.values()) / MICROBATCHES == pytest.approx(loss, rel=1e-6)
    one_by_one = [reference_loss(j) for j in range(MICROBATCHES)]
    assert [losses[str(j)] for j in range(MICROBATCHES)] == pytest.approx(one_by_one, rel=1e-5)


def reference_loss(microbatch: int) -> float:
    model = hard_model()
    words, target = model.microbatch(0, microbatch)
    return float(model.loss(model.build_stage(0, 1, CPU)(words), target).detach())


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", NAMES)
def test_exported_files_compute_the_gradients_of_one_process(
    folder: Path, reference: tuple[Gradients, float], name: str, form: str
) -> None:
    assert relative_error(gradients_in(folder, f"{name}.{form}"), reference[0]) <= TOLERANCE


def test_receive_buffers_live_from_receive_to_backward(folder: Path) -> None:
    """PyTorch's own stages keep a buffer per microbatch and direction for the whole run."""
    for rank in range(2):
        counts = json.loads((folder / f"1f1b.compute_comms.{rank}.json").read_text())
        for most, left in counts.values():
            assert most <= 2
            assert left == 0


# --- one rank in this process


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(problem: Problem, orders: Orders) -> WholePlan:
    return WholePlan("plan", problem, orders, 0.0)


def one_rank(model: Any, orders: Sequence[str], microbatches: int = 2) -> TorchExecutor:
    """A V of one rank: both its stages are here."""
    modules = {index: model.build_stage(index, 2, CPU).train() for index in (0, 1)}
    plan = whole(unit_problem(1, microbatches), Orders.from_text([orders]))
    return TorchExecutor(plan, 0, modules, model, device=CPU, backend="gloo", timeout=10)


OVERTAKING = ["0F0", "0F1", "1F1", "1F0", "1I0", "1B1", "0I0", "1W0", "0B1", "0W0"]


@pytest.mark.usefixtures("alone")
def test_losses_and_records_have_the_plans_microbatches() -> None:
    """The runtime uses other microbatch labels, because the last stage runs 1 before 0 here."""
    result = one_rank(hard_model(), OVERTAKING).step(0)
    assert result.losses == pytest.approx({j: reference_loss(j) for j in (0, 1)}, rel=1e-5)
    assert [str(record.action) for record in result.records] == OVERTAKING
    for before, record in zip([None, *result.records], result.records, strict=False):
        assert record.wait <= record.start <= record.end
        assert before is None or before.end <= record.wait
        assert record.received == 0


@pytest.mark.usefixtures("alone")
def test_a_second_step_computes_the_same_gradients() -> None:
    executor = one_rank(hard_model(), OVERTAKING)
    executor.step(0)
    first = {name: p.grad.clone() for name, p in parameters_of(executor) if p.grad is not None}
    for _, parameter in parameters_of(executor):
        parameter.grad = None
    executor.step(0)
    again = {name: p.grad for name, p in parameters_of(executor) if p.grad is not None}
    assert relative_error(again, first) == 0.0


@pytest.mark.usefixtures("alone")
def test_weight_gradients_are_computed_in_w(monkeypatch: pytest.MonkeyPatch) -> None:
    run, queued = WeightGrads.run, []

    def counting(self: WeightGrads) -> None:
        queued.append(len(self))
        run(self)

    monkeypatch.setattr(WeightGrads, "run", counting)
    one_rank(hard_model(), OVERTAKING).step(0)
    assert len(queued) == sum("W" in action for action in OVERTAKING)
    assert min(queued) > 0


def parameters_of(executor: TorchExecutor) -> list[tuple[str, nn.Parameter]]:
    return [pair for stage in executor.runtime._stages for pair in stage.submod.named_parameters()]


class NormedModel(HardModel):
    """Stages with running statistics."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        inner = super().build_stage(stage, n_stages, device)
        width = 17 if stage == n_stages - 1 else 12
        return nn.Sequential(OrderedDict(inner=inner, norm=_NormOfLast(width))).to(device)


class _NormOfLast(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return output


@pytest.mark.usefixtures("alone")
def test_inferring_shapes_leaves_running_statistics_and_gradients_alone() -> None:
    """Shape inference runs the stages on uninitialised memory."""
    model = NormedModel()
    executor = one_rank(model, ["0F0", "0F1", "1F0", "1B0", "1F1", "1B1", "0B0", "0B1"])
    executor.step(0)

    reference = nn.Sequential(*(model.build_stage(index, 2, CPU).train() for index in (0, 1)))
    for index in range(2):
        words, target = model.microbatch(0, index)
        torch.autograd.backward(model.loss(reference(words), target) / 2)
    expected = dict(reference.named_buffers())
    for index, stage in enumerate(executor.runtime._stages):
        for name, found in stage.submod.named_buffers():
            assert torch.allclose(found, expected[f"{index}.{name}"], rtol=1e-5), name
        for name, parameter in stage.submod.named_parameters():
            right = reference.get_parameter(f"{index}.{name}").grad
            assert (parameter.grad is None) == (right is None)
            if right is not None:
                assert torch.allclose(parameter.grad, right, rtol=1e-4, atol=1e-6), name


class UnequalModel(HardModel):
    """Microbatches of different lengths."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        words, target = super().microbatch(step, index)
        return words[:, : 3 + index], target[:, : 3 + index]


@pytest.mark.usefixtures("alone")
def test_unequal_microbatches_are_refused() -> None:
    executor = one_rank(UnequalModel(), OVERTAKING)
    with pytest.raises(ModelError, match=r"inputs have the shapes \[\(2, 3\), \(2, 4\)\]; .*equal shapes"):
        executor.step(0)


class PairModel(HardModel):
    """A stage that returns two tensors."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        inner = super().build_stage(stage, n_stages, device)
        return nn.Sequential(inner, _Pair()) if stage == 0 else inner


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.usefixtures("alone")
def test_a_stage_that_returns_two_tensors_is_refused() -> None:
    with pytest.raises(InvalidRun, match=r"stage 0 returned a tuple; .* must be one"):
        one_rank(PairModel(), OVERTAKING).step(0)


class FailingModel(HardModel):
    """A stage that fails, but not while shapes are inferred."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        inner = super().build_stage(stage, n_stages, device)
        return nn.Sequential(inner, _Failing()) if stage == 1 else inner


class _Failing(nn.Module):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 3:
            raise RuntimeError("out of everything")
        return x.clone()


@pytest.mark.usefixtures("alone")
def test_a_stage_that_fails_is_named_with_its_action() -> None:
    with pytest.raises(RuntimeError) as failed:
        one_rank(FailingModel(), OVERTAKING).step(0)
    assert "out of everything" in str(failed.value.__cause__)
    assert failed.value.__notes__ == ["rank 0, step 0, 1F1"]


# --- traps


def compiled_as_a_whole() -> nn.Module:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def compiled_in_a_part() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].compile(backend="eager")
    return module


@pytest.mark.parametrize(("build", "where"), [(compiled_as_a_whole, ""), (compiled_in_a_part, r" \(1\)")])
def test_compiled_stages_whose_backward_is_split_are_refused(
    build: Callable[[], nn.Module], where: str
) -> None:
    with pytest.raises(InvalidRun, match=rf"stage 3 is compiled{where}, .*I and W.*without torch\.compile"):
        refuse_compiled({2: nn.Linear(2, 2), 3: build()})
    refuse_compiled({2: nn.Linear(2, 2)})


def test_the_runtimes_loaded_lists_are_checked() -> None:
    problem = unit_problem(2, MICROBATCHES)
    orders = relabelled(random_orders(problem, Random(3), 0.3), problem.n_stages)
    plan = whole(problem, orders)
    runtime = torch_runtime(problem, 0)
    load(runtime, lowered(problem, orders))
    check(runtime, plan, orders)
    del runtime.pipeline_order_with_comms[1][-2]
    with pytest.raises(InvalidRun, match=r"not run the plan correctly.*rank 1: stage . must have one"):
        check(runtime, plan, orders)


def test_orders_that_would_mix_up_the_losses_are_refused() -> None:
    problem = unit_problem(1, 2)
    orders = Orders.from_text([OVERTAKING])
    runtime = torch_runtime(problem, 0)
    load(runtime, lowered(problem, orders))
    with pytest.raises(InvalidRun, match=r"1F1 as its forward number 0"):
        check(runtime, whole(problem, orders), orders)


def test_lists_that_the_runtime_rejects_raise_a_clear_error() -> None:
    problem = unit_problem(1, 2)
    with pytest.raises(InvalidRun, match="PyTorch's runtime rejects the plan"):
        load(torch_runtime(problem, 0), [["0F0", "1F0"]])
