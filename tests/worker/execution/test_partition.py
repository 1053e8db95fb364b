"""Plans that assign layers to stages: every partition trains the same model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from support.cut_models import cut_problem, parts
from support.gradients import relative_error
from support.plans import write_plan
from support.selfcheck import Gradients, hard_model, random_orders, reference_gradients, run_in_threads
from support.trained import train_in_threads
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders, first_in_first_out
from zbv_solver.problem.problem import Problem
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.checkpoints.checkpoint_files import Reader
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.build_stages import build_modules, build_stages
from zbv_worker.execution.plan_source import PlanSource
from zbv_worker.execution.rank_plan import PlannedCut, RankPlan, require_layers
from zbv_worker.model.checks import build_layers
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.protocol import Layered
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import GPT as Gpt
from zbv_worker.models.gpt import gpt
from zbv_worker.models.tiny import tiny
from zbv_worker.run.options import TrainingOptions
from zbv_worker.run.plan_change import PlanFile

CPU = torch.device("cpu")
GPT = {"layers": 4, "width": 16, "heads": 2, "length": 16, "sequences": 2, "characters": 20_000}
NAMES = list(hard_model().layer_names())


# --- gradients


@pytest.fixture(scope="module")
def reference() -> tuple[Gradients, float]:
    return reference_gradients(hard_model(), 4)


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2, 2), (0, 3, 4, 1), (1, 0, 4, 3), (5, 1, 2, 0), (1, 0, 0, 7), (8, 0, 0, 0)]
)
@pytest.mark.parametrize("fused", [0.0, 0.4])
def test_any_partition_computes_the_gradients_of_one_process(
    reference: tuple[Gradients, float], sizes: tuple[int, ...], fused: float
) -> None:
    problem = cut_problem(NAMES, sizes)
    found, loss = run_in_threads(problem, random_orders(problem, Random(2), fused), hard_model())
    assert relative_error(found, reference[0]) <= 1e-5
    assert loss == pytest.approx(reference[1], rel=1e-6)


def plan_of(sizes: Sequence[int], rank: int = 0, names: Sequence[str] = NAMES) -> RankPlan:
    problem = cut_problem(names, sizes)
    return RankPlan.of("plan", problem, random_orders(problem, Random(0)), rank)


def test_a_rank_builds_the_layers_of_its_stages_and_no_others() -> None:
    built = [build_modules(hard_model(), plan_of((3, 0, 4, 1), rank), CPU) for rank in (0, 1)]
    found = [
        {stage: [name for name, _ in module.named_children()] for stage, module in modules.items()}
        for modules in built
    ]
    assert found == [
        {0: ["layer0", "layer1", "layer2"], 3: ["layer7"]},
        {1: [], 2: ["layer3", "layer4", "layer5", "layer6"]},
    ]


def test_exactly_the_planned_stages_are_recomputed() -> None:
    found: dict[int, bool] = {}
    for rank in (0, 1):
        plan = plan_of((3, 1, 3, 1), rank)
        plan = replace(plan, cut=replace(plan.cut, recompute=(False, True, False, True)))
        found |= {at: stage.is_recomputed for at, stage in build_stages(hard_model(), plan, CPU).items()}
    assert found == {0: False, 1: True, 2: False, 3: True}


def test_an_empty_stage_passes_its_input_on_and_holds_nothing_else() -> None:
    stage = build_stages(hard_model(), plan_of((3, 0, 4, 1), rank=1), CPU)[1]
    x, gradient = torch.randn(2, 3), torch.randn(2, 3)
    for backward in (stage.backward, stage.backward_input):
        output = stage.forward(0, x, split=True)
        assert output.data_ptr() == x.data_ptr()
        torch.testing.assert_close(backward(0, gradient), gradient, rtol=0, atol=0)
    stage.backward_weight(0)
    assert stage.held == (set(), set())


def test_tied_layers_are_one_tensor_if_the_cut_has_both_on_one_rank() -> None:
    model = gpt(**GPT, tied=True)
    names = model.layer_names()
    modules = build_modules(model, plan_of((2, 1, 1, 2), names=names), CPU)
    shared = modules[0].get_parameter("embedding.token.weight")
    assert modules[3].get_parameter("head.logits.weight") is shared
    apart = [build_modules(model, plan_of((2, 1, 3, 0), rank, names), CPU) for rank in range(2)]
    assert apart[0][0].get_parameter("embedding.token.weight") is not None
    assert apart[1][2].get_parameter("head.logits.weight") is not None


# --- what is refused, before anything starts


@dataclass
class Misnamed:
    """A model with other layers than planned."""

    names: Sequence[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(hard_model(), name)

    def layer_names(self) -> Sequence[str]:
        return self.names

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        return hard_model().build_layers(names, device)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([*NAMES, "layer8"], r"at layer 8 it has nothing, the model 'layer8'"),
        (NAMES[:-1], r"at layer 7 it has 'layer7', the model nothing"),
        ([NAMES[1], NAMES[0], *NAMES[2:]], r"at layer 0 it has 'layer0', the model 'layer1'"),
    ],
)
def test_a_plan_of_other_layers_is_refused(own: list[str], message: str) -> None:
    with pytest.raises(InvalidRun, match=f"partition belongs to another model: {message}"):
        build_stages(Misnamed(own), plan_of((2, 2, 2, 2)), CPU)


def test_a_model_without_layers_is_refused_with_the_methods_that_it_needs() -> None:
    problem = cut_problem(NAMES, (2, 2, 2, 2))
    with pytest.raises(InvalidRun, match=r"Tiny without layer_names and build_layers; see .*Layered"):
        require_layers(tiny(), PlannedCut.of(problem))
    require_layers(tiny(), PlannedCut())


@pytest.mark.parametrize(
    ("module", "found"),
    [(nn.Linear(1, 1), "a Linear;"), (nn.Sequential(nn.Tanh()), "a Sequential of 1 modules;")],
)
def test_wrong_results_of_build_layers_are_refused(module: nn.Module, found: str) -> None:
    class Wrong(Misnamed):
        def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
            return module  # type: ignore[return-value]  # that is the point

    model: Layered = Wrong(NAMES)
    with pytest.raises(ModelError, match=rf"build_layers of layer0, layer1 returned {found} must be"):
        build_layers(model, NAMES[:2], CPU)


@pytest.mark.parametrize(
    ("cut", "what"),
    [
        (PlannedCut(partition=(("a",),)), "partition has 1 stages, but the plan has 4"),
        (PlannedCut(recompute=(True,) * 5), "recompute has 5 stages, but the plan has 4"),
    ],
)
def test_a_partition_with_a_wrong_number_of_stages_is_refused(cut: PlannedCut, what: str) -> None:
    with pytest.raises(InvalidRun, match=what):
        replace(plan_of((2, 2, 2, 2)), cut=cut)


def test_the_models_fingerprint_includes_the_partition() -> None:
    spec = ModelSpec("a:b")
    cuts = [None, parts(NAMES, (2, 2, 2, 2)), parts(NAMES, (1, 3, 2, 2)), parts(NAMES, (1, 3, 0, 4))]
    assert len({spec.fingerprint(4, cut) for cut in cuts}) == len(cuts)
    assert spec.fingerprint(4, cuts[1]) == spec.fingerprint(4, tuple(map(tuple, cuts[1] or ())))


# --- plans: files, changes, and a run


def test_a_plan_file_has_the_partition_and_recomputation(tmp_path: Path) -> None:
    problem = cut_problem(NAMES, (1, 4, 0, 3), (True, False, False, True))
    path = write_plan(tmp_path / "plan.json", problem, random_orders(problem, Random(0)))
    for rank in (0, 1):
        cut = PlanSource(file=path).rank_plan(rank, 1.0).cut
        assert cut.partition == tuple(map(tuple, parts(NAMES, (1, 4, 0, 3))))
        assert cut.recompute == (True, False, False, True)
        assert cut.recomputed == (0, 3)
        assert PlanSource(file=path).whole(1.0).of_rank(rank).cut == cut


def test_a_run_keeps_its_partition_of_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = cut_problem(NAMES, (2, 2, 3, 1))
    path = write_plan(tmp_path / "next.json", after, random_orders(after, Random(1)))
    watched = PlanFile(path, plan_of((1, 3, 3, 1)))
    watched.close()
    watched.look()  # unless its thread has
    assert "found a plan with another partition" in capsys.readouterr().err
    assert watched.take() is None


UNEVEN = cut_problem(gpt(**GPT).layer_names(), (1, 3, 0, 2), (False, True, False, True))
OTHER = cut_problem(gpt(**GPT).layer_names(), (2, 1, 2, 1), (True, False, False, False))


def ascending_orders(problem: Problem) -> Orders:
    """A random order whose microbatches ascend, so that sums over them have one order in every cut."""
    return first_in_first_out(random_orders(problem, Random(3), fused=0.0), problem.n_stages)


class Kept(Gpt):
    """A model that records the modules and optimizers of all ranks, which are threads."""

    modules: ClassVar[list[nn.Sequential]] = []
    optimizers: ClassVar[list[torch.optim.Optimizer]] = []

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        self.modules.append(super().build_layers(names, device))
        return self.modules[-1]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.optimizers.append(super().optimizer(parameters))
        return self.optimizers[-1]


def test_changing_the_partition_by_a_checkpoint_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    """Two ranks that exchange layers after three of six steps, and two that keep them."""
    config, saving = gpt(**GPT).config, TrainingOptions(checkpoint=CheckpointOptions(tmp_path, every=3))
    train_in_threads(UNEVEN, ascending_orders(UNEVEN), TrainingOptions(), 6, lambda: Kept(config, seed=0))
    for problem, steps in ((UNEVEN, 3), (OTHER, 6)):
        train_in_threads(problem, ascending_orders(problem), saving, steps, lambda: Gpt(config, seed=0))
    changed = Reader(tmp_path / "step-00000006.g2")
    states = {p: state for optimizer in Kept.optimizers for p, state in optimizer.state.items()}
    named = [(whole_name(n), p) for module in Kept.modules for n, p in module.named_parameters()]
    assert len(named) == len(states)
    for name, parameter in named:
        assert torch.equal(read(changed, f"model.{name}", parameter), parameter)
        for moment, value in states[parameter].items():
            assert torch.equal(read(changed, f"optimizer.state.{name}.{moment}", value), value)


def read(reader: Reader, name: str, like: Tensor) -> Tensor:
    found = torch.full_like(like, -1.0, requires_grad=False)
    reader.read_into({name: found})
    return found
