"""Measures a model's stages on this machine and turns them into a planning problem.

A rank's measurement is in :mod:`zbv_worker.measure.profile.rank`; this module starts the ranks and combines
their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from pydantic import TypeAdapter
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.stages import Communication, Copies, Costs, Placement

from zbv_worker.measure.problems import plan_memory
from zbv_worker.measure.ranks import measure_on_ranks
from zbv_worker.measure.stage_memory import StageMemory, StaticBytes
from zbv_worker.model.spec import ModelSpec
from zbv_worker.stage.program import PLAIN, Program
from zbv_worker.stage.recorder import SplitShare
from zbv_worker.transport.world import Backend

PROGRESS_MARK = "measured"
"""The beginning of the line that a rank prints after every round."""


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure."""

    model: ModelSpec
    pp_degree: int
    microbatches: int
    repeats: int = 10
    """Rounds to measure after the warm-up; the problem uses the median."""
    by_layer: bool = False
    """Whether to measure the model's layers one by one, instead of its stages."""
    recompute: bool = False
    """Whether to measure every layer with recomputation as well; needs ``by_layer``."""
    copies: bool = False
    """Whether to measure copies of what F's keep to the host and back; needs stages."""
    pairs: bool = False
    """Whether to measure pairs of an F and a backward as well."""
    ranks_per_stage: int = 1
    """Processes that hold the same stages, for a model with expert or tensor parallelism. They are
    neighbours, and the model makes their groups."""
    backend: Backend = "gloo"
    memory_limit_fraction: float | None = None
    """Sets each rank's limit to its static memory plus this fraction of the activations that 1F1B holds on
    its fullest rank. None for no limit."""
    program: Program = PLAIN
    """The program to measure: that of the run."""
    timeout: float = 120.0
    """Seconds that a rank waits for another."""


ACTION_TIMES = ("forward", "backward_input", "backward_weight", "backward")
"""The measured times of a stage, F, I, W and B, as :class:`StageProfile` and problems name them."""
HIDDEN_TIMES = ("forward", "backward_input", "backward")
"""Those of which a pair may hide a part."""


LEAST_WEIGHT_SHARE = 0.05
"""The smallest share of W in the backward's time for which the planner may split it."""


@dataclass(frozen=True)
class Spread:
    """The median and the 90th percentile of a repeatedly measured time, in seconds."""

    median: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of some measurements, in seconds."""
        ordered = sorted(seconds)
        return cls(median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)])

    @property
    def microseconds(self) -> float:
        """The median as a problem's time."""
        return round(self.median * 1e6, 1)


@dataclass(frozen=True)
class CopyProfile:
    """Copies of what the F of a stage keeps, to the host and back."""

    offload: Spread
    reload: Spread
    moved: int
    """The bytes that the device has free in between."""


@dataclass(frozen=True)
class PairProfile:
    """What pairs of an F and the backward of another microbatch save, of one stage or layer.

    A pair saves the time that it is shorter than its actions one after the other.
    """

    with_input: Spread
    """Saved by F and I."""
    with_backward: Spread
    """Saved by F and B."""
    share: float
    """Of the collectives that F and I start, those of F."""


@dataclass(frozen=True)
class StageProfile:
    """Times and memory of one stage or layer; memory in bytes."""

    stage: int
    """The stage's index; for a layer, its index in the model."""
    forward: Spread
    backward_input: Spread
    backward_weight: Spread
    backward: Spread
    held_after_forward: int
    held_after_input: int
    held_after_weight: int = 0
    """Memory held per microbatch after F, I and W."""
    workspace: int = 0
    """The largest temporary memory of F, I, W and B."""
    split: SplitShare | None = None
    """The share of the weight gradients that W computes; None without trainable parameters."""
    copies: CopyProfile | None = None
    """None if they were not measured."""
    pairs: PairProfile | None = None
    """None if they were not measured, or hide nothing because F or the backward has no collectives."""

    @property
    def costs(self) -> tuple[dict[str, float], StageMemory]:
        """The times of a problem by name, in us, and the memory.

        They are the medians. But if a split gains nothing, W costs nothing and I as much as B, so that the
        planner uses B.
        """
        times = {name: getattr(self, name).microseconds for name in ACTION_TIMES}
        if self.is_worth_splitting:
            return times, self.memory
        return {**times, "backward_input": times["backward"], "backward_weight": 0.0}, self.memory

    @property
    def communication(self) -> dict[str, float] | None:
        """What a pair hides of F, I and B, in us: a problem's ``communication``. None without pairs.

        F and I share what their pair saves by the collectives that they start. What F and B save beyond F's
        part is B's. If a split gains nothing, B stands for I.
        """
        pairs, times = self.pairs, self.costs[0]
        if pairs is None:
            return None
        with_input, with_backward = (
            max(0.0, saved.microseconds) for saved in (pairs.with_input, pairs.with_backward)
        )
        saved = with_input if self.is_worth_splitting else with_backward
        forward = pairs.share * saved
        parts = (forward, saved - forward, max(0.0, with_backward - forward))
        hidden = zip(HIDDEN_TIMES, parts, strict=True)
        return {name: round(min(time, times[name]), 1) for name, time in hidden}

    @property
    def weight_share(self) -> float:
        """The share of W in the backward's time.

        A backward takes as long as I and W, about as long as B, and about twice as long as F. The shortest of
        these counts, because a disturbance that made one of them longer must not hide W.
        """
        both = self.backward_input.median + self.backward_weight.median
        known = [time for time in (both, self.backward.median, 2 * self.forward.median) if time > 0]
        return min(1.0, self.backward_weight.median / min(known)) if known else 0.0

    @property
    def is_worth_splitting(self) -> bool:
        """Whether W computes gradients, and takes enough of the backward's time to fill bubbles."""
        return self.split is not None and self.split.share > 0 and self.weight_share >= LEAST_WEIGHT_SHARE

    @property
    def memory(self) -> StageMemory:
        """The memory alone."""
        return StageMemory(
            self.held_after_forward, self.held_after_input, self.held_after_weight, self.workspace
        )


@dataclass(frozen=True)
class LayerProfile:
    """One layer, measured as if it were a stage."""

    name: str
    kept: StageProfile
    recomputed: StageProfile | None
    """Times and memory with recomputed activations; None if that was not measured."""
    static: StaticBytes
    """Static memory of the layer; ``receives`` and ``workspace`` are 0."""
    output_bytes: int
    """Size of one microbatch's output; for the last layer, of the loss."""
    update: Spread | None = None
    """Time of the optimizer's step; None without trainable parameters."""


@dataclass(frozen=True)
class LinkSample:
    """Measured transfers of one size."""

    bytes: int
    seconds: Spread


@dataclass(frozen=True)
class LinkProfile:
    """Measured transfers from one rank to another, and a line fitted through them.

    Latency is in seconds, bandwidth in bytes per second (None if larger transfers took no longer).
    """

    sender: int
    receiver: int
    samples: tuple[LinkSample, ...]
    latency: float
    bandwidth: float | None


@dataclass(frozen=True)
class ReductionProfile:
    """Measured all-reduces of a number of ranks, and a line fitted through them.

    Latency is in seconds, bandwidth in bytes per second that a rank sends: 2 (n - 1) / n of the tensor.
    """

    ranks: int
    is_sharded: bool
    """Whether it is a reduce-scatter and an all-gather instead, which together send as much."""
    samples: tuple[LinkSample, ...]
    latency: float
    bandwidth: float | None


@dataclass(frozen=True)
class RankProfile:
    """The measurements of one rank."""

    rank: int
    stages: tuple[StageProfile, ...]
    """Empty if layers were measured."""
    static: StaticBytes
    """Memory that the rank held all the time."""
    p2p: dict[int, Spread]
    """One-way times in seconds, by boundary, for the boundaries that this rank timed."""
    links: tuple[LinkProfile, ...] = ()
    """The links that this rank timed."""
    layers: tuple[LayerProfile, ...] = ()
    program: dict[str, str] = field(default_factory=dict)
    """The measured program, from :meth:`~zbv_worker.stage.program.Program.described`."""
    input_shape: tuple[int, ...] = ()
    """Shape of the model's input, if it is one tensor and this rank has the first layer."""
    reductions: tuple[ReductionProfile, ...] = ()
    """Empty if stages were measured."""


_RANK_PROFILE = TypeAdapter(RankProfile)


def read_rank(document: Any) -> RankProfile:
    """Read a rank's measurements from :func:`rank_json`."""
    return _RANK_PROFILE.validate_python(document)


def rank_json(found: RankProfile) -> Any:
    """A rank's measurements as JSON."""
    return _RANK_PROFILE.dump_python(found, mode="json")


def measure_ranks(
    options: ProfileOptions, on_round: Callable[[int], None] | None = None
) -> list[RankProfile]:
    """Measure with one process per rank; returns the measurements by rank.

    Parameters
    ----------
    on_round
        Called with the number of finished rounds, again and again.

    Raises
    ------
    LaunchError
        If a rank fails; includes the end of its log.
    """
    answers = measure_on_ranks(
        ["zbv_worker.measure.profile.rank"],
        asdict(options),
        options.pp_degree * options.ranks_per_stage,
        timeout=5 * options.timeout,
        on_poll=on_round and (lambda ranks: on_round(ranks.log(0).count(PROGRESS_MARK))),
    )
    return [read_rank(answer) for answer in answers[:: options.ranks_per_stage]]


def profile(options: ProfileOptions, on_round: Callable[[int], None] | None = None) -> Problem:
    """Measure a model and return the problem: times in us, memory in bytes. See :func:`measure_ranks`."""
    return to_problem(options, measure_ranks(options, on_round))


def stages_of(ranks: Sequence[RankProfile]) -> list[StageProfile]:
    """The measured stages of all ranks, in model order."""
    return sorted((stage for rank in ranks for stage in rank.stages), key=lambda stage: stage.stage)


def to_problem(options: ProfileOptions, ranks: Sequence[RankProfile]) -> Problem:
    """The problem of measured stages, with placement v."""
    placement = Placement.of("v", options.pp_degree)
    stages = stages_of(ranks)
    times, memory = zip(*(stage.costs for stage in stages), strict=True)
    p2p = {boundary: spread.microseconds for rank in ranks for boundary, spread in rank.p2p.items()}
    static = tuple(float(rank.static.total) for rank in ranks)
    return Problem(
        placement=placement,
        microbatches=options.microbatches,
        costs=Costs(
            **{name: tuple(each[name] for each in times) for name in ACTION_TIMES},
            p2p=tuple(p2p.get(boundary, 0.0) for boundary in range(placement.n_stages - 1)),
        ),
        memory=plan_memory(memory, static, _limit(options, stages, static)),
        copies=_copies(stages),
        communication=_communication(stages),
        units=Units(time="us", memory="bytes"),
        measured=tuple(sorted(program_of(ranks).items())),
    )


def _copies(stages: Sequence[StageProfile]) -> Copies | None:
    measured = [(stage, stage.copies) for stage in stages if stage.copies is not None]
    if not measured:
        return None
    return Copies(
        offload=tuple(copies.offload.microseconds for _, copies in measured),
        reload=tuple(copies.reload.microseconds for _, copies in measured),
        offloadable=tuple(float(min(copies.moved, stage.held_after_forward)) for stage, copies in measured),
    )


def _communication(stages: Sequence[StageProfile]) -> Communication | None:
    hidden = [stage.communication for stage in stages]
    if not any(hidden):
        return None
    return Communication(*(tuple(each[name] if each else 0.0 for each in hidden) for name in HIDDEN_TIMES))


def program_of(ranks: Sequence[RankProfile]) -> dict[str, str]:
    """The program that the ranks measured; a value that differs between ranks lists all."""
    names = {name: None for rank in ranks for name in rank.program}
    return {
        name: ", ".join(dict.fromkeys(rank.program[name] for rank in ranks if name in rank.program))
        for name in names
    }


def _limit(
    options: ProfileOptions, stages: Sequence[StageProfile], static: Sequence[float]
) -> tuple[float, ...] | None:
    """1F1B keeps p - r microbatches in flight on rank r, which would host stages 2r and 2r + 1 of the V."""
    fraction, p = options.memory_limit_fraction, options.pp_degree
    if fraction is None:
        return None
    held = [float(stage.held_after_forward) for stage in stages]
    activations = max(
        min(p - rank, options.microbatches) * (held[2 * rank] + held[2 * rank + 1]) for rank in range(p)
    )
    return tuple(own + fraction * activations for own in static)
