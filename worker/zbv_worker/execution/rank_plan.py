"""One rank's part of a plan, and its lowering to instructions: where inputs come from and outputs go.

A rank plan comes from the service, which sends each rank its own list and channels, or from a plan file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zbv_solver.plans.channels import Channel, ChannelKind, Transfer, channels, channels_of
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import Problem

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.planned_cut import PlannedCut
from zbv_worker.transport.channels import ChannelKey, key_of


@dataclass(frozen=True)
class RankPlan:
    """The part of a plan that one rank executes.

    Attributes
    ----------
    actions
        In execution order.
    channels
        The channels that this rank sends or receives on.
    cut
        The cut of the whole model, so that every rank can check it against its model.
    """

    plan_id: str
    rank: int
    placement: Placement
    microbatches: int
    actions: tuple[Action, ...]
    channels: tuple[Channel, ...]
    cut: PlannedCut = field(default_factory=PlannedCut)

    def __post_init__(self) -> None:
        self.cut.require_stages(self.placement.n_stages)
        _check_complete(self)

    @classmethod
    def of(cls, plan_id: str, problem: Problem, orders: Orders, rank: int) -> RankPlan:
        """A rank's part of a whole plan."""
        return cls(
            plan_id=plan_id,
            rank=rank,
            placement=problem.placement,
            microbatches=problem.microbatches,
            actions=tuple(orders.actions(rank)),
            channels=channels_of(rank, channels(problem, orders)),
            cut=PlannedCut.of(problem),
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank hosts, in model order."""
        return self.placement.stages_of[self.rank]


@dataclass(frozen=True)
class Remote:
    """A tensor that crosses between ranks."""

    channel: ChannelKey
    transfer: Transfer


@dataclass(frozen=True)
class Local:
    """A tensor passed on within the rank."""

    kind: ChannelKind
    transfer: Transfer


@dataclass(frozen=True)
class Instruction:
    """An action with the source of its input and the sink of its output.

    Attributes
    ----------
    source, sink
        Where the input (F: activation, I and B: gradient) comes from and the output goes; None for data into
        the first stage, the loss of the last stage, and W.
    split
        For F: whether the backward is split into I and W.
    completes_stage
        Whether this action is the last that adds to its stage's gradients.
    peer
        The global rank that sends the input; None if no other rank does.
    """

    action: Action
    source: Remote | Local | None
    sink: Remote | Local | None
    split: bool
    completes_stage: bool
    peer: int | None


def lower(plan: RankPlan, global_rank: Callable[[int], int] = int) -> tuple[Instruction, ...]:
    """Lower a rank's actions to instructions.

    Parameters
    ----------
    global_rank
        Maps a pipeline position to a global rank; the identity if there is one pipeline.

    Raises
    ------
    InvalidRun
        If the plan's channels do not carry what its actions send and receive, in the order of production.
    """
    split = {(a.stage, a.microbatch) for a in plan.actions if a.letter == "I"}
    # I adds to gradients too, but its W always follows, so the last W or B is the last addition.
    last_of = {a.stage: a for a in plan.actions if a.letter in "WB"}

    def instruction(action: Action) -> Instruction:
        source, sink = _ends(plan, action)
        return Instruction(
            action,
            source,
            sink,
            split=(action.stage, action.microbatch) in split,
            completes_stage=action == last_of[action.stage],
            peer=global_rank(source.channel.sender) if isinstance(source, Remote) else None,
        )

    program = tuple(map(instruction, plan.actions))
    _check_channels(plan, program)
    return program


def forwards(program: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """The F's of a rank's list, in its order: an evaluation runs these.

    An F depends only on F's, so they are executable if the plan is. Every rank leaves out the same actions,
    so the channels of activations carry the same transfers in the same order as in a step.
    """
    return tuple(i for i in program if i.action.letter == "F")


def producer_of(action: Action) -> tuple[int, bool, int]:
    """The producer of an action's input: its stage, whether it is an F, and its microbatch."""
    is_forward = action.letter == "F"
    return action.stage + (-1 if is_forward else 1), is_forward, action.microbatch


def _ends(plan: RankPlan, action: Action) -> tuple[Remote | Local | None, Remote | Local | None]:
    """The source and the sink of an action."""
    stage, last = action.stage, plan.placement.n_stages - 1
    above = stage - 1 if stage > 0 else None
    below = stage if stage < last else None
    if action.letter == "W":
        return None, None
    if action.letter == "F":
        return (
            _end(plan, "activation", above, action.microbatch, incoming=True),
            _end(plan, "activation", below, action.microbatch, incoming=False),
        )
    return (
        _end(plan, "gradient", below, action.microbatch, incoming=True),
        _end(plan, "gradient", above, action.microbatch, incoming=False),
    )


def _end(
    plan: RankPlan, kind: ChannelKind, boundary: int | None, microbatch: int, *, incoming: bool
) -> Remote | Local | None:
    if boundary is None:
        return None
    transfer = Transfer(boundary, microbatch)
    first, second = plan.placement.rank_of[boundary], plan.placement.rank_of[boundary + 1]
    if first == second:
        return Local(kind, transfer)
    peer = second if first == plan.rank else first
    ends = (peer, plan.rank) if incoming else (plan.rank, peer)
    return Remote(ChannelKey(*ends, kind), transfer)


def _check_complete(plan: RankPlan) -> None:
    """Check that every (stage, microbatch) of the rank has one F and one backward, in an executable order.

    The service verifies whole plans; this guards the worker against plans from any other source.
    """
    if not 0 <= plan.rank < plan.placement.pp_degree:
        raise InvalidRun(f"found rank {plan.rank}; the plan has ranks 0 to {plan.placement.pp_degree - 1}.")
    allowed = {"": ("F",), "F": ("I", "B"), "I": ("W",)}
    state: dict[tuple[int, int], str] = {
        (stage, microbatch): "" for stage in plan.stages for microbatch in range(plan.microbatches)
    }
    for action in plan.actions:
        cell = (action.stage, action.microbatch)
        before = state.get(cell)
        if before is None or action.letter not in allowed.get(before, ()):
            found = "is on another rank" if before is None else f"follows {before or 'nothing'}"
            raise InvalidRun(
                f"rank {plan.rank}: action {action} {found}. Each stage and microbatch on a rank needs one "
                f"F, then either one B, or one I and one W. Check the plan with `zbv check`."
            )
        state[cell] = action.letter
    open_cells = [f"{stage}·{microbatch}" for (stage, microbatch), s in state.items() if s not in ("W", "B")]
    if open_cells:
        raise InvalidRun(
            f"rank {plan.rank}: the plan does not finish stage·microbatch {', '.join(open_cells[:5])}. Each "
            f"needs one F, and either one B, or one I and one W. Check the plan with `zbv check`."
        )


def _check_channels(plan: RankPlan, program: Iterable[Instruction]) -> None:
    sent: dict[ChannelKey, list[Transfer]] = {}
    received: dict[ChannelKey, set[Transfer]] = {}
    for instruction in program:
        if isinstance(instruction.sink, Remote):
            sent.setdefault(instruction.sink.channel, []).append(instruction.sink.transfer)
        if isinstance(instruction.source, Remote):
            received.setdefault(instruction.source.channel, set()).add(instruction.source.transfer)
    stated = {key_of(channel): channel.transfers for channel in plan.channels}
    wrong = stated.keys() ^ (sent.keys() | received.keys())
    wrong |= {key for key, transfers in sent.items() if stated.get(key) != tuple(transfers)}
    wrong |= {
        key
        for key, transfers in received.items()
        if len(stated.get(key, ())) != len(transfers) or set(stated[key]) != transfers
    }
    if wrong:
        raise InvalidRun(
            f"rank {plan.rank}: the plan's channels ({', '.join(map(str, sorted(wrong)))}) do not carry what "
            f"its actions send and receive. Fetch the plan again from the service that made it."
        )
