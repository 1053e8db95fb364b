"""Layers without a plan are measured on the running ranks and planned on the first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.thread_transport import ThreadHub
from torch import Tensor, nn
from zbv_solver.plans.reading import parse_plan
from zbv_worker.errors import InvalidRun
from zbv_worker.model.layer_list import as_layered
from zbv_worker.pipeline import automatic_plan
from zbv_worker.pipeline.automatic_plan import plan_layers
from zbv_worker.pipeline.pipeline import Pipeline
from zbv_worker.stage.program import PLAIN

CPU = torch.device("cpu")
WIDTH, P, MICROBATCHES = 16, 2, 4
EXAMPLE = (torch.ones(4, WIDTH), torch.zeros(4, WIDTH))


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), output.numel()


def planned(layers: Any, *, p: int = P, replicas: int = 1, **changed: Any) -> list[dict[str, Any]]:
    """The document of every rank; the ranks are threads."""
    hub = ThreadHub(p, replicas)
    arguments: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "example": EXAMPLE,
        "microbatches": MICROBATCHES,
        "program": PLAIN,
        "backend": "gloo",
        "timeout": 300.0,
        **changed,
    }
    return hub.run(lambda rank: plan_layers(as_layered(layers), transport=rank, device=CPU, **arguments))


def layers_of(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(count)]


def test_every_rank_gets_one_plan_of_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    layers = layers_of(6)
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    torch.manual_seed(3)
    first, second = planned(layers)
    assert first == second
    plan = parse_plan(first)
    assert plan.problem.pp_degree == P
    assert plan.problem.microbatches == MICROBATCHES
    assert plan.problem.model is not None
    assert [name for names in plan.problem.model.partition for name in names] == list("012345")
    torch.testing.assert_close(nn.Sequential(*layers).state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    said = capsys.readouterr().err
    assert "measuring 6 layers on 2 ranks," in said
    assert said.count("planned 4 microbatches on 2 ranks") == 1  # only rank 0 speaks
    assert "rank 1: " in said
    assert "an even cut would take" in said


def test_replicas_follow_the_plan_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    documents = planned(layers_of(4), replicas=2, loss=weighted)
    assert all(document == documents[0] for document in documents)
    assert parse_plan(documents[0]).problem.pp_degree == P


def test_layers_that_share_parameters_are_planned_as_a_v() -> None:
    layers = layers_of(3)
    document, _ = planned([*layers, layers[0]])
    assert parse_plan(document).problem.placement.kind == "v"


@pytest.mark.parametrize(
    ("layers", "changed", "said"),
    [
        (1, {}, "found 1 layers and 2 ranks"),
        (4, {"example": (torch.ones(4, WIDTH),)}, "example: found 1 values"),
        (4, {"loss": None}, "planning needs the loss"),
    ],
)
def test_missing_things_are_named(layers: int, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRun, match=said):
        planned(layers_of(layers), **changed)


def test_without_the_planner_every_rank_learns_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(problem: object) -> None:
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(automatic_plan, "_planned_here", missing)
    said = r"needs numba, which is not installed\. Install zbv\[solver\], or pass"
    with pytest.raises(InvalidRun, match=said):
        planned(layers_of(3))


def writers() -> list[nn.Module]:
    """Layers that write to their inputs. Each is measured singly, with several microbatches at once."""
    return [
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.0, inplace=True),
        nn.ReLU(inplace=True),
    ]


@pytest.mark.parametrize("more", [list, writers])
def test_a_pipeline_without_a_plan_trains(
    more: Callable[[], list[nn.Module]], capsys: pytest.CaptureFixture[str]
) -> None:
    layers = nn.Sequential(*more(), *layers_of(3))
    before = copy.deepcopy(layers).eval()
    with Pipeline(None, layers, nn.functional.mse_loss, microbatches=2, example=EXAMPLE) as pipe:
        x, y = torch.rand(8, WIDTH), torch.rand(8, WIDTH)
        expected = nn.functional.mse_loss(before(x), y)
        torch.testing.assert_close(pipe.evaluate(x, y), expected, check_dtype=False)
    assert "planned 2 microbatches on 1 rank:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"microbatches": 0, "example": EXAMPLE}, "found microbatches=0; must be an integer of at least 1"),
        ({"microbatches": 2, "example": EXAMPLE[0]}, "found a Tensor as the example; must be a tuple"),
    ],
)
def test_a_pipeline_without_a_plan_checks_what_it_gets(given: Any, said: str) -> None:
    with pytest.raises(InvalidRun, match=said):
        Pipeline(None, layers_of(2), nn.functional.mse_loss, **given)


@pytest.mark.parametrize("given", [{}, {"microbatches": 2}, {"example": EXAMPLE}])
def test_a_pipeline_without_a_plan_needs_an_example_and_a_number_of_microbatches(given: Any) -> None:
    with pytest.raises(InvalidRun, match=r"needs microbatches= .* and example="):
        Pipeline(None, layers_of(2), nn.functional.mse_loss, **given)
