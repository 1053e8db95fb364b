"""Pairs on two pipeline ranks of two expert-parallel processes, whose layers exchange tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.expert_rank import CASES, EXPERTS, STEPS, batch, layers, plan_of
from support.rank_files import found_by
from torch import Tensor, nn
from zbv_worker.tracing.merged_trace import END, START

RANKS = range(4)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank and case."""
    folder = tmp_path_factory.mktemp("pairs")
    return found_by("expert_rank", len(RANKS), folder)


@cache
def alone(name: str, step: int) -> dict[str, Tensor]:
    """The gradients in one process with all experts."""
    model = nn.Sequential(*(build() for build in layers(CASES[name], None)))
    parts = [batch(rank, step) for rank in range(EXPERTS)]
    torch.stack([nn.functional.mse_loss(model(x), y) for x, y in parts]).mean().backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_plain])
@pytest.mark.parametrize("step", range(STEPS))
def test_gradients_are_those_of_one_process(name: str, step: int, found: Found) -> None:
    wanted, seen = alone(name, step), set[str]()
    for position in range(2):
        parts = [found[2 * position + k][name]["pairs"]["gradients"][step] for k in range(EXPERTS)]
        for parameter in {*parts[0], *parts[1]}:  # an expert has its gradient on one process
            total = sum(part[parameter] for part in parts if parameter in part) / EXPERTS
            torch.testing.assert_close(total, wanted[parameter], rtol=1e-4, atol=1e-6)
            seen.add(parameter)
    assert seen == set(wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rank", RANKS)
def test_results_are_those_of_one_half_after_the_other(name: str, rank: int, found: Found) -> None:
    """To the last bit: random numbers, precision, buffers and scales do not depend on turns."""
    pairs, alone = found[rank][name]["pairs"], found[rank][name]["one by one"]
    for step in range(STEPS):
        assert pairs["gradients"][step].keys() == alone["gradients"][step].keys()
        for parameter, gradient in pairs["gradients"][step].items():
            assert torch.equal(gradient, alone["gradients"][step][parameter]), parameter
    assert all(torch.equal(buffer, alone["buffers"][n]) for n, buffer in pairs["buffers"].items())
    assert torch.equal(pairs["random"], alone["random"])


@pytest.mark.parametrize("name", [name for name in CASES if name != "buffers, recomputed"])
def test_one_half_computes_while_the_other_communicates(name: str, found: Found) -> None:
    for rank in RANKS:
        hidden = 0
        open_by: dict[str, str] = {}
        for thread, event, what in found[rank][name]["pairs"]["log"]:
            if event == "starts":
                open_by[thread] = what
            elif event == "got":
                del open_by[thread]
            elif any(other != thread for other in open_by):  # an expert computes, or its gradient
                hidden += 1
        assert hidden > 0
        assert {thread for thread, *_ in found[rank][name]["one by one"]["log"]} == {"MainThread"}


def test_a_backward_that_restores_buffers_of_its_forwards_stage_takes_no_turns(found: Found) -> None:
    for rank in RANKS:
        assert {thread for thread, *_ in found[rank]["buffers, recomputed"]["pairs"]["log"]} == {"MainThread"}


@pytest.mark.parametrize("name", ["V, random delays", "one stage per rank"])
def test_a_trace_has_both_halves_of_a_pair_which_overlap(name: str, found: Found) -> None:
    ranks = plan_of(CASES[name])["ranks"]
    for trace in found[0][name]["pairs"]["trace"]:
        entries = ranks[trace.rank // EXPERTS]
        actions = [part for entry in entries for part in entry.split("+")]
        assert [str(action) for action in trace.actions] == actions
        times = dict(zip(actions, trace.times[0].tolist(), strict=True))
        for first, second in (entry.split("+") for entry in entries if "+" in entry):
            assert times[first][START] < times[second][END]
            assert times[second][START] < times[first][END]
