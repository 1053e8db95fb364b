"""Pairs on two pipeline ranks of two expert-parallel processes, whose layers exchange tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zbv_worker as zbv
from support.gradients import gradients
from support.processes import wait_until
from support.rank_files import found_by
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.problem.reading import parse_problem
from zbv_worker.execution.turns import Half
from zbv_worker.tracing.merged_trace import END, START

EXPERTS, LAYERS, MICROBATCHES, ROWS, WIDTH, STEPS = 2, 4, 4, 5, 8, 2
TIMEOUT = 60.0

Log = list[tuple[str, str, str]]
"""The name of the thread, ``starts``, ``got`` or ``computes``, and what."""


class Exchange(torch.autograd.Function):
    """Sends rows to the processes of a group; the backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], at: Place) -> Tensor:
        ctx.sent, ctx.received, ctx.at = sent, received, at
        return at.exchange(x, received, sent, "tokens")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.at.exchange(gradients[0], ctx.sent, ctx.received, "gradients"), None, None, None


@dataclass
class Place:
    """Where a layer is: its group, a log, and how long it dawdles at random."""

    group: Any
    log: Log
    random: Random
    delay: float = 0.0

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        """All-to-all of rows."""
        out = x.new_empty(sum(received), *x.shape[1:])
        self.note("starts", what)
        self.dawdle()
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        self.note("got", what)
        return out

    def note(self, event: str, what: str) -> None:
        self.log.append((threading.current_thread().name, event, what))

    def dawdle(self) -> None:
        if self.delay:
            time.sleep(self.random.uniform(0, self.delay))


def expert(index: int, layer: int) -> nn.Module:
    torch.manual_seed(100 * layer + index)
    return nn.Linear(WIDTH, WIDTH)


class Experts(nn.Module):
    """Every row goes to the expert that a gate chooses; without a place, all experts are here."""

    def __init__(self, layer: int, place: Place | None, case: Case):
        super().__init__()
        self.place, self.is_checkpointed = place, case.is_checkpointed
        mine = range(EXPERTS) if place is None else [dist.get_rank(place.group)]
        self.experts = nn.ModuleDict({str(index): expert(index, layer) for index in mine})
        torch.manual_seed(layer)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.dropout = nn.Dropout(case.dropout)
        self.seen: Tensor | None
        self.register_buffer("seen", torch.zeros(()) if case.counts else None)

    def forward(self, x: Tensor) -> Any:
        if self.is_checkpointed and self.training:
            return checkpoint(self._computed, x, use_reentrant=False)
        return self._computed(x)

    def _computed(self, x: Tensor) -> Tensor:
        if self.seen is not None:
            self.seen += 1
        scores = self.gate(x).softmax(-1)
        weight, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        rows = x[order]
        if self.place is None:
            parts = torch.split(rows, counts.tolist())
            out = torch.cat([self._of_expert(index, part) for index, part in enumerate(parts)])
        else:
            out = self._exchanged(rows, counts)
        y = torch.zeros_like(x).index_copy(0, order, out.to(x.dtype))
        return x + torch.tanh(self.dropout(y * weight[:, None]))

    def _of_expert(self, index: int, rows: Tensor) -> Any:
        return self.experts[str(index)](rows)

    def _exchanged(self, rows: Tensor, counts: Tensor) -> Any:
        place: Any = self.place
        each = [1] * EXPERTS
        of_others = place.exchange(counts, each, each, "counts")
        sent, received = counts.tolist(), of_others.tolist()
        here = Exchange.apply(rows, sent, received, place)  # type: ignore[no-untyped-call]
        place.note("computes", "expert")
        place.dawdle()
        out = self._of_expert(dist.get_rank(place.group), here)
        if out.requires_grad:
            out.register_hook(lambda gradient: place.note("computes", "expert's gradient"))
        return Exchange.apply(out, received, sent, place)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Case:
    placement: str = "v"
    is_split: bool = False
    """Whether pairs have I's, or B's."""
    dropout: float = 0.0
    is_checkpointed: bool = False
    """Whether layers checkpoint themselves."""
    is_recomputed: bool = False
    """Whether the stages are recomputed."""
    precision: Any = "float32"
    delay: float = 0.0
    is_autocast: bool = False
    """Whether the caller's own autocast is around the step."""
    counts: bool = False
    """Whether layers count their calls in a buffer."""

    @property
    def is_plain(self) -> bool:
        """Whether gradients are those of one process in float32."""
        return not self.dropout and self.precision == "float32" and not self.is_autocast


CASES = {
    "V, random delays": Case(is_split=True, delay=0.004),
    "one stage per rank": Case("single", is_split=True, counts=True),
    "dropout, recomputed": Case("single", is_split=True, dropout=0.3, is_recomputed=True),
    "dropout, checkpoints, float16": Case(
        dropout=0.3, is_checkpointed=True, precision="float16", counts=True
    ),
    "buffers, recomputed": Case("single", is_split=True, is_recomputed=True, counts=True),
    "the caller's autocast": Case("loop", is_split=True, is_autocast=True, is_checkpointed=True),
}


def plan_of(case: Case) -> dict[str, Any]:
    """A plan with pairs."""
    costs: dict[str, Any] = {"forward": 18, "backward_input": 18, "backward_weight": 12, "p2p": 1}
    costs["communication"] = {"forward": 6, "backward_input": 6, "backward": 6}
    document = {"pp_degree": 2, "microbatches": MICROBATCHES, "placement": case.placement, "costs": costs}
    problem, letter = parse_problem(document), "I" if case.is_split else "B"
    found = (joined(problem, orders).all_text() for _, orders in starts(problem))
    return {"problem": document, "ranks": next(ranks for ranks in found if _pairs(ranks, letter))}


def _pairs(ranks: list[list[str]], letter: str) -> list[str]:
    """The pairs with backwards of this letter."""
    return [entry for row in ranks for entry in row if "+" in entry and letter in entry]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The rows of an expert-parallel process."""
    random = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=random)
    return x, x.flip(1) / 2


def layers(case: Case, place: Place | None) -> list[Callable[[], nn.Module]]:
    return [partial(Experts, index, place, case) for index in range(LAYERS)]


def one_by_one(forward: Half, backward: Half) -> None:
    forward()
    backward()


def trained(case: Case, mesh: Any, overlap: Any) -> dict[str, Any]:
    """Losses, gradients of all steps, buffers, and what happened in the last step."""
    log: Log = []
    place = Place(mesh["ep"].get_group(), log, Random(dist.get_rank()), case.delay)
    torch.manual_seed(5)
    found: dict[str, Any] = {"losses": [], "gradients": []}
    with zbv.Pipeline(
        plan_of(case),
        layers(case, place),
        nn.functional.mse_loss,
        mesh=mesh,
        precision=case.precision,
        timeout=TIMEOUT,
        overlap=overlap,
    ) as pipe:
        for stage in pipe._own.trained.stages.values():
            stage.is_recomputed = case.is_recomputed
        for step in range(STEPS):
            log.clear()
            x, y = batch(dist.get_rank(place.group), step)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.is_autocast):
                found["losses"].append(pipe.step(x, y))
            found["gradients"].append(gradients(pipe))
            for parameter in pipe.parameters():
                parameter.grad = None
        found["trace"] = pipe.trace()
        found["buffers"] = {n: b.clone() for stage in pipe.modules.values() for n, b in stage.named_buffers()}
        found["log"] = list(log)
        found["random"] = torch.get_rng_state()
    return found


@dataclass
class FailingPlace(Place):
    """Where the last process fails at the second exchange of its second step on a thread."""

    thread: str = ""
    left: int = 2

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        if threading.current_thread().name == self.thread and what != "counts":
            self.left -= 1
            if self.left == 0:
                raise ArithmeticError("no luck")
        return super().exchange(x, received, sent, what)


def error_of(mesh: Any, thread: str) -> str:
    """What a process says that fails, or that loses another one."""
    place = FailingPlace(mesh["ep"].get_group(), [], Random(dist.get_rank()), 0.004)
    case = CASES["V, random delays"]
    x, y = batch(dist.get_rank(place.group), 0)
    try:
        with zbv.Pipeline(
            plan_of(case), layers(case, place), nn.functional.mse_loss, mesh=mesh, timeout=TIMEOUT
        ) as pipe:
            pipe.step(x, y)
            place.left, place.thread = 2, thread if dist.get_rank() == RANKS[-1] else ""
            pipe.step(x, y)
    except Exception as error:
        return " ".join([repr(error), *getattr(error, "__notes__", [])])
    raise AssertionError("a step went on without one half")


def of_rank(folder: Path, thread: str = "") -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, EXPERTS), mesh_dim_names=("pp", "ep"))
    found: dict[str, Any] = {}
    if thread:
        found["error"] = error_of(mesh, thread)
        if dist.get_rank() == 0:  # its process has the store with the reason, which the others read
            wait_until(
                lambda: all((folder / f"rank-{rank}.pt").exists() for rank in RANKS[1:]), "the others' end"
            )
        return found
    for name, case in CASES.items():
        print(name, flush=True)  # noqa: T201 - a rank's log
        found[name] = {"pairs": trained(case, mesh, None), "one by one": trained(case, mesh, one_by_one)}
    dist.barrier()
    dist.destroy_process_group()
    return found


RANKS = range(4)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank and case."""
    folder = tmp_path_factory.mktemp("pairs")
    return found_by("worker.pipeline.test_pairs", len(RANKS), folder)


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
    pairs, alone = (
        {what: found[rank][name][way][what] for what in ("gradients", "buffers", "random")}
        for way in ("pairs", "one by one")
    )
    torch.testing.assert_close(pairs, alone, rtol=0, atol=0)


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


@pytest.mark.parametrize("thread", ["MainThread", "zbv-pair"])
def test_an_error_in_a_half_on_one_rank_ends_all(thread: str, tmp_path: Path) -> None:
    *others, failed = (
        found["error"] for found in found_by("worker.pipeline.test_pairs", len(RANKS), tmp_path, thread)
    )
    assert failed.startswith("ArithmeticError('no luck') rank 3, step 1, action")
    reason = "rank 3 lost: ArithmeticError: no luck"
    assert any(reason in said for said in others)
    # One that waits in a collective of the model, with a rank that has ended, may get the error of that.
    for rank, said in enumerate(others):
        assert reason in said or f"rank {rank}, step 1, action" in said


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
