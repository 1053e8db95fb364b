"""Measures a model's stages on this machine and makes a planning problem of them.

p local ranks are started, and measure at the same time: ranks share caches and memory bandwidth, so a stage
alone on the machine would look faster than it will be. What a rank measures is in
:mod:`zbv_worker.profile_rank`; here the ranks are started and their answers are put together.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zbv_solver.placement import Placement
from zbv_solver.problem import Costs, Memory, Problem, Units
from zbv_solver.schema import problem_json

from zbv_worker.distributed import Backend
from zbv_worker.launch import LocalRanks, python_command
from zbv_worker.model import ModelSpec

PROGRESS_MARK = "measured"
"""A rank prints a line that begins so after every round."""


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure.

    Attributes
    ----------
    repeats
        Rounds that are measured, after warm-up; the median counts.
    memory_limit_fraction
        Each rank's limit: its static memory plus this fraction of the activations that 1F1B holds on its
        fullest rank. None for no limit.
    timeout
        Seconds that a rank waits for another.
    """

    model: ModelSpec
    pp_degree: int
    microbatches: int
    repeats: int = 10
    backend: Backend = "gloo"
    memory_limit_fraction: float | None = None
    timeout: float = 120.0


@dataclass(frozen=True)
class StageProfile:
    """One stage: times in seconds, memory in bytes held after F and after I (and none after W)."""

    stage: int
    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    held_after_forward: int
    held_after_input: int


@dataclass(frozen=True)
class RankProfile:
    """What one rank measured.

    Attributes
    ----------
    static_bytes
        Parameters, gradients, optimizer state, and receive buffers posted ahead.
    p2p
        One-way latency in seconds, by boundary, of those whose measurement this rank timed.
    """

    rank: int
    stages: tuple[StageProfile, ...]
    static_bytes: int
    p2p: dict[int, float]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> RankProfile:
        """Read what :func:`dataclasses.asdict` made."""
        return cls(
            rank=document["rank"],
            stages=tuple(StageProfile(**stage) for stage in document["stages"]),
            static_bytes=document["static_bytes"],
            p2p={int(boundary): seconds for boundary, seconds in document["p2p"].items()},
        )


def profile(options: ProfileOptions, on_round: Callable[[int], None] | None = None) -> Problem:
    """Measure, with one process per rank, and return the problem: times in us, memory in bytes.

    Parameters
    ----------
    on_round
        Called with the number of finished rounds whenever it may have grown.

    Raises
    ------
    LaunchError
        When a rank fails, with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="zbv-profile-") as name:
        folder = Path(name)
        request = folder / "request.json"
        request.write_text(json.dumps(asdict(options)))
        command = python_command("zbv_worker.profile_rank", str(request))
        with LocalRanks([command] * options.pp_degree, folder) as ranks:

            def poll() -> None:
                if on_round is not None:
                    on_round(ranks.log(0).count(PROGRESS_MARK))

            ranks.wait(timeout=options.timeout * 5, on_poll=poll)
        found = [
            RankProfile.from_json(json.loads((folder / f"profile-{rank}.json").read_text()))
            for rank in range(options.pp_degree)
        ]
    return to_problem(options, found)


def to_problem(options: ProfileOptions, ranks: Sequence[RankProfile]) -> Problem:
    """The problem that the ranks' measurements describe, placement v."""
    placement = Placement.of("v", options.pp_degree)
    stages = sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.stage)
    p2p: dict[int, float] = {}
    for rank in ranks:
        p2p |= rank.p2p
    held = tuple(float(stage.held_after_forward) for stage in stages)
    between = tuple(float(stage.held_after_input) for stage in stages)
    static = tuple(float(rank.static_bytes) for rank in sorted(ranks, key=lambda rank: rank.rank))
    return Problem(
        placement=placement,
        microbatches=options.microbatches,
        costs=Costs(
            forward=_microseconds([stage.forward for stage in stages]),
            backward_input=_microseconds([stage.backward_input for stage in stages]),
            backward_weight=_microseconds([stage.backward_weight for stage in stages]),
            backward=_microseconds([stage.backward for stage in stages]),
            p2p=_microseconds([p2p.get(boundary, 0.0) for boundary in range(placement.n_stages - 1)]),
        ),
        memory=Memory(
            forward=held,
            backward_input=tuple(after - before for after, before in zip(between, held, strict=True)),
            backward_weight=tuple(-after for after in between),
            static=static,
            limit=_limit(options, held, static),
        ),
        units=Units(time="us", memory="bytes"),
    )


def write_problem(problem: Problem, path: Path) -> None:
    """Write a problem document; ``-`` is standard output."""
    text = json.dumps(problem_json(problem), indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text)


def _limit(
    options: ProfileOptions, held: Sequence[float], static: Sequence[float]
) -> tuple[float, ...] | None:
    """1F1B keeps p - r microbatches in flight on rank r, whose stage is V stages 2r and 2r + 1 together."""
    fraction, p = options.memory_limit_fraction, options.pp_degree
    if fraction is None:
        return None
    activations = max(
        min(p - rank, options.microbatches) * (held[2 * rank] + held[2 * rank + 1]) for rank in range(p)
    )
    return tuple(own + fraction * activations for own in static)


def _microseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value * 1e6, 1) for value in seconds)
