"""What differs between processes: random numbers, errors at the start, and ranks that fail or leave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.failing_ranks import ended
from support.plans import random_plan, searched, unit_problem, write_plan
from support.rank_files import found_by
from support.small_pipeline import WIDTH, batch, model
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint
from zbv_worker.host.local_ranks import LocalRanks, python_command

TIMEOUT = 60.0
Saw = dict[str, Any]


def pipeline(folder: Path, **more: Any) -> zbv.Pipeline:
    given = {"plan": folder / "plan.json", "loss": nnf.mse_loss, "timeout": TIMEOUT, **more}
    layers = given.pop("layers", None) or model()
    return zbv.Pipeline(given.pop("plan"), layers, startup_timeout=TIMEOUT, **given)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Dropping(nn.Module):
    """A layer with a dropout whose forward is checkpointed; records the masks."""

    def __init__(self, masks: list[list[float]]):
        super().__init__()
        self.linear, self.masks = nn.Linear(WIDTH, WIDTH), masks

    def _drop(self, x: Tensor) -> Tensor:
        mask = nnf.dropout(torch.ones_like(x), training=self.training)
        self.masks.append(mask.flatten().tolist())
        y: Tensor = self.linear(x) * mask
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._drop, x, use_reentrant=False)
        return y


def drops(folder: Path) -> Saw:
    """The masks of two steps, of a step after the seed was set again, and the user's own random numbers."""
    found, masks = Saw(), list[list[float]]()
    torch.manual_seed(5)
    layers = nn.Sequential(*(Dropping(masks) for _ in range(4)))
    with pipeline(folder, layers=layers) as pipe:
        for name in ("first", "second", "evaluated", "again"):
            masks.clear()
            if name in ("first", "again"):
                torch.manual_seed(7)
            before = torch.get_rng_state()
            (pipe.evaluate if name == "evaluated" else pipe.step)(*batch())
            found[name] = [*masks]
            found[f"state of {name}"] = torch.equal(before, torch.get_rng_state())
            found[f"own {name}"] = torch.rand(2).tolist()
    return found


class Failing(nn.Module):
    """Fails in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("this layer is broken")
        return x


def fails(folder: Path) -> Saw:
    """A layer of rank 1 fails; afterwards a new pipeline works."""
    layers = [*model()]
    layers[2] = nn.Sequential(layers[2], Failing())
    pipe = pipeline(folder, layers=layers)
    return Saw(said=[error_of(lambda: pipe.step(*batch())) for _ in range(3)])


def refuses(folder: Path) -> Saw:
    """Errors that a rank finds at the start are raised on all ranks."""
    wrong: tuple[Saw, ...] = (
        {"layers": [*model()][:2]},
        {"microbatches": 7},
        {"data_rank": 2},
        {"data_rank": dist_rank()},
        {"layers": [*model(), nn.Tanh()] if dist_rank() else [*model()]},
        {"layers": [*[*model()][:2], (lambda: 3) if dist_rank() else nn.Identity(), *[*model()][3:]]},
        {"layers": [model()[0]] * 4 if dist_rank() else [*model()]},
        {"plan": None, "microbatches": 4, "example": batch()} if dist_rank() else {},
    )
    return Saw(said=[error_of(partial(pipeline, folder, **more)) for more in wrong])


def dist_rank() -> int:
    return int(os.environ["RANK"])


def of_rank(folder: Path, *programs: str) -> dict[str, Saw]:
    """What this rank saw, by program."""
    return {program: globals()[program](folder) for program in programs}


PROGRAMS = ("drops", "refuses", "fails")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What the ranks saw, by program; one process per rank runs all, one after the other."""
    folder = tmp_path_factory.mktemp("pipeline")
    searched(unit_problem(2, 4)).save(folder / "plan.json")
    ranks = found_by("worker.pipeline.test_two_processes", 2, folder, *PROGRAMS)
    return {program: [rank[program] for rank in ranks] for program in PROGRAMS}


def test_ranks_that_are_seeded_alike_drop_other_elements(seen: dict[str, Found]) -> None:
    for rank in seen["drops"]:
        for name in ("first", "second", "again"):
            assert len(rank[name]) == 16  # two layers, four microbatches, each with a recomputation
            assert all(rank[name].count(mask) == 2 for mask in rank[name])
        assert rank["again"] == rank["first"]
    drawn = [mask for rank in seen["drops"] for name in ("first", "second") for mask in rank[name]]
    assert all(drawn.count(mask) == 2 for mask in drawn)


def test_random_numbers_outside_of_the_layers_stay_those_of_the_user(seen: dict[str, Found]) -> None:
    """Loaders that shuffle draw them, and must do so alike on all ranks."""
    first, second = seen["drops"]
    for name in ("first", "second", "evaluated", "again"):
        assert first[f"own {name}"] == second[f"own {name}"]
        assert first[f"state of {name}"] == (name == "evaluated")
    assert first["own first"] == first["own again"]


SAID = (
    "found 2 layers; the plan has 4 stages",
    "found microbatches=7; the plan has 4",
    "found data_rank=2; must be a rank of the pipeline, 0 to 1.",
    "Disagreement: the ranks differ in data rank (rank 0: 0; rank 1: 1)",
    "Disagreement: the ranks differ in model",
    "layer 2: the function returned a int",
    "Disagreement: the ranks differ in model",  # only one shares parameters
    "found a plan on rank 0, and no plan on rank 1",
)


def test_an_error_at_the_start_is_raised_on_all_ranks(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["refuses"])
    for wanted, *found in zip(SAID, first, second, strict=True):
        assert all(wanted in said for said in found)
    assert first[5] == second[5].replace("InvalidRun: ", "InvalidRun: rank 1 cannot start: ")


def test_a_failed_rank_fails_its_peers_at_once_with_its_reason(seen: dict[str, Found]) -> None:
    first, second = (rank["said"] for rank in seen["fails"])
    assert first[0] == second[0] == "nothing"
    assert second[1] == "ValueError: this layer is broken"
    assert first[1].startswith("PeerLost: rank 1 lost: ValueError: this layer is broken (test_two_")
    for said in (first, second):
        assert "this pipeline has failed in an earlier call (rank " in said[2]


P = 3
LOST = P - 1


def leave(way: str, pipe: zbv.Pipeline) -> None:
    if way == "returns":
        pipe.close()
    elif way == "raises":
        raise ValueError("the user's own error")
    else:
        os.kill(os.getpid(), signal.Signals[way])


def train_until_one_leaves(plan: str, way: str) -> None:
    """The last rank leaves after its second step. The others train on until they get an error."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, rank = torch.randn(8, 4), int(os.environ["RANK"])
    layers = [nn.Linear(4, 4) for _ in range(2 * P)]
    timeout = 10.0 if way == "SIGSTOP" else TIMEOUT  # only a stopped rank is noticed by a timeout
    pipe = zbv.Pipeline(plan, layers, nnf.mse_loss, timeout=timeout, startup_timeout=TIMEOUT)
    try:
        for step in range(1_000_000):
            pipe.step(x, x)
            if rank == LOST and step == 1:
                leave(way, pipe)
                return
    except zbv.WorkerError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "plan.json", *random_plan(P, 4))


@pytest.mark.parametrize("way", ["returns", "raises", "SIGKILL", "SIGSTOP"])
def test_the_other_ranks_name_the_rank_that_has_left_and_end(plan: Path, tmp_path: Path, way: str) -> None:
    command = python_command("worker.pipeline.test_two_processes", str(plan), way)
    with LocalRanks([command] * P, tmp_path / "logs") as ranks:
        ended(ranks, set(range(P)) - {LOST}, time.monotonic())
        for rank in range(P):
            log = ranks.log(rank)
            if rank != LOST:
                assert ranks.processes[rank].returncode == 0, log
                assert f"rank {LOST}" in log, "\n".join(ranks.log(each) for each in range(P))
                assert any(kind in log for kind in ("PeerLost", "ChannelTimeout", "Disagreement")), log


if __name__ == "__main__":
    train_until_one_leaves(*sys.argv[1:])
