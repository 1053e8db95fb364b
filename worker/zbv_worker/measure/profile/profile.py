"""Measures a model's stages on this machine and makes a planning problem of them.

p local ranks are started, and measure at the same time: ranks share caches and memory bandwidth, so a stage
alone on the machine would look faster than it will be. What a rank measures is in
:mod:`zbv_worker.measure.profile.rank`; here the ranks are started and their answers are put together.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Costs, Memory, Problem, Units

from zbv_worker.execution.split_backward import SplitShare
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.model.protocol import ModelSpec
from zbv_worker.transport.distributed import Backend

PROGRESS_MARK = "measured"
"""A rank prints a line that begins so after every round."""


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure.

    Attributes
    ----------
    repeats
        Rounds that are measured, after warm-up; the median counts.
    by_layer
        Whether the model's layers are measured one by one, in place of its stages.
    recompute
        Whether every layer is measured recomputed, too; needs ``by_layer``.
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
    by_layer: bool = False
    recompute: bool = False
    backend: Backend = "gloo"
    memory_limit_fraction: float | None = None
    timeout: float = 120.0


@dataclass(frozen=True)
class Spread:
    """A time that was measured repeatedly, in seconds: the middle one, and the one that a tenth exceed."""

    median: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of some measurements."""
        ordered = sorted(seconds)
        return cls(median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)])


@dataclass(frozen=True)
class StageProfile:
    """One stage, or one layer: its times, and memory in bytes.

    Attributes
    ----------
    stage
        Its number; of a layer, its place in the model.
    held_after_forward, held_after_input, held_after_weight
        Of a microbatch, after F, after I and after W.
    workspace
        Beyond what is held before or after an action, while one runs: the most of F, I, W and B.
    split
        How much of the weight gradients W computes; None without trainable parameters.
    """

    stage: int
    forward: Spread
    backward_input: Spread
    backward_weight: Spread
    backward: Spread
    held_after_forward: int
    held_after_input: int
    held_after_weight: int = 0
    workspace: int = 0
    split: SplitShare | None = None


@dataclass(frozen=True)
class StaticBytes:
    """What a rank holds all the time, in bytes.

    Attributes
    ----------
    buffers
        Of the modules (running statistics).
    receives
        Buffers of receives that are posted ahead.
    workspace
        What an action needs only while it runs; one runs at a time, so the largest.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    receives: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Their sum, the problem's ``static``."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class LayerProfile:
    """One layer, measured as a stage of its own.

    Attributes
    ----------
    recomputed
        The same with activations computed again in the backward; None where that was not asked for.
    static
        Of the layer alone; ``receives`` and ``workspace`` are 0.
    output_bytes
        Of one microbatch; of the last layer, the loss.
    """

    name: str
    kept: StageProfile
    recomputed: StageProfile | None
    static: StaticBytes
    output_bytes: int


@dataclass(frozen=True)
class LinkSample:
    """Transfers of one size."""

    bytes: int
    seconds: Spread


@dataclass(frozen=True)
class LinkProfile:
    """Transfers from one rank to another, and what they say: latency in seconds, and bandwidth in bytes per
    second (None where larger transfers took no longer).
    """

    sender: int
    receiver: int
    samples: tuple[LinkSample, ...]
    latency: float
    bandwidth: float | None


@dataclass(frozen=True)
class RankProfile:
    """What one rank measured.

    Attributes
    ----------
    stages
        Empty where layers were measured.
    static
        What the rank held all the time while it measured.
    p2p
        One way, in seconds, by boundary, of those whose measurement this rank timed.
    links
        Those that this rank timed.
    """

    rank: int
    stages: tuple[StageProfile, ...]
    static: StaticBytes
    p2p: dict[int, Spread]
    links: tuple[LinkProfile, ...] = ()
    layers: tuple[LayerProfile, ...] = ()


_RANK_PROFILE = TypeAdapter(RankProfile)


def read_rank(text: str) -> RankProfile:
    """Read what :func:`rank_json` wrote."""
    return _RANK_PROFILE.validate_json(text)


def rank_json(found: RankProfile) -> str:
    """A rank's measurements as JSON."""
    return _RANK_PROFILE.dump_json(found).decode()


def profile(options: ProfileOptions, on_round: Callable[[int], None] | None = None) -> Problem:
    """Measure, and return the problem: times in us, memory in bytes. See :func:`measure_ranks`."""
    return to_problem(options, measure_ranks(options, on_round))


def measure_ranks(
    options: ProfileOptions, on_round: Callable[[int], None] | None = None
) -> list[RankProfile]:
    """Measure with one process per rank; what each found, by rank.

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
        command = python_command("zbv_worker.measure.profile.rank", str(request))
        with LocalRanks([command] * options.pp_degree, folder) as ranks:

            def poll() -> None:
                if on_round is not None:
                    on_round(ranks.log(0).count(PROGRESS_MARK))

            ranks.wait(timeout=options.timeout * 5, on_poll=poll)
        return [read_rank((folder / f"profile-{rank}.json").read_text()) for rank in range(options.pp_degree)]


def to_problem(options: ProfileOptions, ranks: Sequence[RankProfile]) -> Problem:
    """The problem that the ranks' measurements describe, placement v."""
    placement = Placement.of("v", options.pp_degree)
    stages = sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.stage)
    p2p = {boundary: spread.median for rank in ranks for boundary, spread in rank.p2p.items()}
    held = tuple(float(stage.held_after_forward) for stage in stages)
    between = tuple(float(stage.held_after_input) for stage in stages)
    static = tuple(float(rank.static.total) for rank in sorted(ranks, key=lambda rank: rank.rank))
    return Problem(
        placement=placement,
        microbatches=options.microbatches,
        costs=Costs(
            forward=_microseconds([stage.forward.median for stage in stages]),
            backward_input=_microseconds([stage.backward_input.median for stage in stages]),
            backward_weight=_microseconds([stage.backward_weight.median for stage in stages]),
            backward=_microseconds([stage.backward.median for stage in stages]),
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
