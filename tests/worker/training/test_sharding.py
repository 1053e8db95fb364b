"""Sharded replicas train like unsharded ones, and gather and sum parameters in the order of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.paths import TESTS
from support.sharded_rank import CASES
from support.thread_transport import ThreadHub
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.training.sharding import ShardedGradients

CPU = torch.device("cpu")
ACTIONS = ("forward", "backward", "backward_input", "backward_weight")
RANKS = range(4)
Found = list[dict[str, dict[bool, dict[str, Any]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank, case and whether it was sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    command = python_command("support.sharded_rank", str(folder))
    with LocalRanks([command] * len(RANKS), folder / "logs", {"PYTHONPATH": str(TESTS)}) as ranks:
        ranks.wait(timeout=120)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in RANKS]


def plan_of(case: str, rank: int) -> RankPlan:
    return RankPlan.of("plan", CASES[case].problem, CASES[case].orders, rank // 2)


def units_in_order(case: str, rank: int) -> list[str]:
    """The layers of a rank's stages in the order in which the plan first uses them."""
    problem, plan = CASES[case].problem, plan_of(case, rank)
    assert problem.model is not None
    modules = {stage: problem.model.partition[stage] for stage in plan.stages}
    order = dict.fromkeys(action.stage for action in plan.actions)
    return [f"stage {s}, {name.replace('.', '')}" for s in order for name in modules[s]]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", sorted(set(CASES) - {"clipped"}))
def test_sharded_replicas_get_exactly_the_parameters_of_unsharded_ones(
    found: Found, case: str, rank: int
) -> None:
    """Two replicas add two numbers, so even the rounding is equal.

    With parameters in half precision the optimizer rounds some elements differently: torch computes the last
    few of a tensor without vector instructions, and shards end elsewhere.
    """
    whole, sharded = found[rank][case][False], found[rank][case][True]
    assert sharded["losses"] == whole["losses"]
    assert sharded["evaluations"] == whole["evaluations"]
    assert set(sharded["parameters"]) == set(whole["parameters"])
    for name, value in whole["parameters"].items():
        rtol, atol = (2**-8, 1e-7) if case == "half" else (0.0, 0.0)
        torch.testing.assert_close(sharded["parameters"][name], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rank", RANKS)
def test_the_norm_for_clipping_includes_the_parts_of_all_replicas(found: Found, rank: int) -> None:
    whole, sharded = found[rank]["clipped"][False], found[rank]["clipped"][True]
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(sharded["parameters"][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_kept_by_one_replica(found: Found, case: str) -> None:
    for rank in (0, 2):  # replicas of a position are neighbours
        for name, value in found[rank][case][False]["parameters"].items():
            kept = [found[one][case][True]["kept"][name] for one in (rank, rank + 1)]
            assert sum(kept) == value.numel()
            assert max(kept) <= (value.shape[0] + 1) // 2 * (value.numel() // value.shape[0])


def first_step(found: Found, case: str, rank: int) -> list[tuple[str, str, int]]:
    """What happened in the first of two steps; the second must be the same."""
    events: list[tuple[str, str, int]] = [
        (what, label.replace(".", ""), at) for what, label, at in found[rank][case][True]["events"]
    ]  # the names of one model have dots, those of the other have none
    middle = len(events) // 2
    assert events[:middle] == events[middle:]
    return events[:middle]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", ["uneven", "mixed"])
def test_layers_are_gathered_in_the_plans_order_at_most_one_ahead(found: Found, case: str, rank: int) -> None:
    started: list[str] = []
    used: list[str] = []
    for what, label, _ in first_step(found, case, rank):
        if what == "gather":
            started.append(label)
        elif what == "complete":
            used.append(label)
        assert started[: len(used)] == used
        assert len(started) <= len(used) + 1
    assert started == used == units_in_order(case, rank)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", ["uneven", "mixed"])
def test_layers_are_used_by_the_stages_first_action_and_freed_after_its_last(
    found: Found, case: str, rank: int
) -> None:
    units, plan = units_in_order(case, rank), plan_of(case, rank)
    last = {action.stage: at for at, action in enumerate(plan.actions, 1)}
    actions, freed = 0, []
    used: dict[str, int] = {}
    for what, label, _ in first_step(found, case, rank):
        if what == "complete":
            used[label] = actions
        elif what == "free":
            freed.append(label)
            assert actions == last[stage_of(label)]
        actions += what in ACTIONS
    first = {a.stage: at for at, a in reversed(list(enumerate(plan.actions)))}
    assert used == {unit: first[stage_of(unit)] for unit in units}
    assert sorted(freed) == sorted(units)


def stage_of(unit: str) -> int:
    return int(unit.split(",")[0].removeprefix("stage "))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", ["uneven", "mixed"])
def test_only_layers_in_use_and_the_next_one_hold_memory(found: Found, case: str, rank: int) -> None:
    size: dict[str, int] = {}
    started: set[str] = set()
    before = 0
    for what, label, held in first_step(found, case, rank):
        if what == "gather":
            size[label] = held - before
            started.add(label)
        elif what == "free":
            started.discard(label)
        if what in (*ACTIONS, "gather", "free"):
            assert held == sum(size[unit] for unit in started)
            before = held
    assert before == 0
    parameters = found[rank][case][False]["parameters"]
    total = sum(value.nbytes for value in parameters.values())
    assert total <= sum(size.values()) <= 1.25 * total  # padded to a multiple of the replicas


@pytest.mark.parametrize("rank", [0, 1])
def test_other_stages_compute_while_gradients_are_summed(found: Found, rank: int) -> None:
    """Nobody waits for a sum before the step's last action, although a stage ended earlier."""
    events = [what for what, _, _ in first_step(found, "uneven", rank)]
    last = max(at for at, what in enumerate(events) if what in ACTIONS)
    begun = events.index("sum")
    assert any(what in ACTIONS for what in events[begun:last])
    assert events.index("awaited") > last
    assert events.count("awaited") == events.count("sum")


@pytest.mark.parametrize("case", ["mixed", "half"])
def test_gradients_are_summed_in_float32(found: Found, case: str) -> None:
    sums = {label for what, label, _ in found[0][case][True]["events"] if what == "sum"}
    assert sums == {"torch.float32"}
    expected = torch.bfloat16 if case == "half" else torch.float32
    assert {value.dtype for value in found[0][case][True]["parameters"].values()} == {expected}


def test_a_hook_sees_whole_gradients(found: Found) -> None:
    """It masks elements, so its effect differs from a run without it."""
    hooked, plain = (found[0][case][True]["parameters"] for case in ("hooked", "mixed"))
    assert any(not torch.allclose(hooked[name], value, atol=1e-2) for name, value in plain.items())


def test_a_parameter_without_dimensions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "from_group", lambda *_: None)
    module = nn.Linear(2, 2)
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(InvalidRun, match=r"'scale' of a Linear; .* Give it the shape \(1,\)"):
        ShardedGradients({0: module}, ThreadHub(1).transport(0), None, CPU, 1.0)  # type: ignore[arg-type]
