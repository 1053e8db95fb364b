"""One rank's part of a plan, its cut of the model, and its lowering to instructions: where inputs come from
and outputs go.

A rank plan comes from the service, which sends each rank its own list and channels, or from a plan file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zbv_solver.plans.channels import Channel, Transfer, TransferKind, channels, channels_of
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Placement

from zbv_worker.errors import InvalidRun
from zbv_worker.model.checks import layer_names
from zbv_worker.model.protocol import Layered, PipelineModel
from zbv_worker.transport.channels import ChannelKey, key_of

Partition = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PlannedCut:
    """A plan's cut of the model, identical on every rank."""

    partition: Partition | None = None
    """The layer names of every stage, in model order; None if the model decides."""
    recompute: tuple[bool, ...] | None = None
    """For every stage, whether the backward recomputes its activations; None for no stage."""

    @classmethod
    def of(cls, problem: Problem) -> PlannedCut:
        """The cut of a plan's problem."""
        if problem.model is None:
            return cls()
        return cls(problem.model.partition, problem.model.cut.recompute)

    @classmethod
    def parse(cls, partition: Sequence[Sequence[str]] | None, recompute: Sequence[bool] | None) -> PlannedCut:
        """Read the cut from a service's or another rank's JSON."""
        return cls(
            None if partition is None else tuple(map(tuple, partition)),
            None if recompute is None else tuple(recompute),
        )

    def recomputes(self, stage: int) -> bool:
        """Whether the backward recomputes a stage's activations."""
        return self.recompute is not None and self.recompute[stage]

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The recomputed stages."""
        return tuple(stage for stage, is_so in enumerate(self.recompute or ()) if is_so)

    def require_stages(self, n_stages: int) -> None:
        """Raise :class:`InvalidRun` if the cut does not have ``n_stages`` stages."""
        for what, found in (("partition", self.partition), ("recompute", self.recompute)):
            if found is not None and len(found) != n_stages:
                raise InvalidRun(
                    f"the plan's {what} has {len(found)} stages, but the plan has {n_stages}. Fetch the plan "
                    f"again from the service that made it."
                )


@dataclass(frozen=True)
class RankPlan:
    """The part of a plan that one rank executes."""

    plan_id: str
    rank: int
    placement: Placement
    microbatches: int
    actions: tuple[Action, ...]
    """In execution order."""
    channels: tuple[Channel, ...]
    """The channels that this rank sends or receives on."""
    cut: PlannedCut = field(default_factory=PlannedCut)
    """The cut of the whole model, so that every rank can check it against its model."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """The program whose costs the plan was made with (:class:`zbv_worker.stage.program.Program`), as names
    and values; empty if the plan does not say."""
    features: tuple[Mapping[str, float], ...] = ()
    """The numbers that describe each microbatch, by name; empty if all are equal."""
    pairs: tuple[int, ...] = ()
    """The places in ``actions`` of the F's that run together with the action after them."""
    copies: tuple[tuple[int, Action], ...] = ()
    """Copies to the host (letters O, D, R) in their order, each with the place in ``actions`` of the action
    after it."""

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
            measured=dict(problem.measured),
            features=by_microbatch({each.name: each.value for each in problem.features}),
            pairs=orders.pairs(rank),
            copies=orders.copies_of(rank),
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank hosts, in model order."""
        return self.placement.stages_of[self.rank]


def by_microbatch(features: Mapping[str, Sequence[float]]) -> tuple[Mapping[str, float], ...]:
    """The features of every microbatch, from the values of every feature; empty without features."""
    return tuple(dict(zip(features, values, strict=True)) for values in zip(*features.values(), strict=True))


@dataclass(frozen=True)
class Remote:
    """A tensor that crosses between ranks."""

    channel: ChannelKey
    transfer: Transfer


@dataclass(frozen=True)
class Local:
    """A tensor passed on within the rank."""

    transfer: Transfer


@dataclass(frozen=True)
class Instruction:
    """An action with the source of its input and the sink of its output."""

    action: Action
    source: Remote | Local | None
    sink: Remote | Local | None
    """Where the input (F: activation, I and B: gradient) comes from and the output goes; None for data
    into the first stage, the loss of the last stage, and W."""
    split: bool
    """For F: whether the backward is split into I and W."""
    completes_stage: bool
    """Whether this action is the last that adds to its stage's gradients."""
    peer: int | None
    """The global rank that sends the input; None if no other rank does."""
    is_paired: bool = False
    """For F: whether it runs together with the next instruction."""


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
    pairs = set(plan.pairs)

    def instruction(place: int, action: Action) -> Instruction:
        stage, letter, microbatch = action
        source = sink = None
        if letter == "F":
            source = _end(plan, "activation", stage - 1, microbatch)
            sink = _end(plan, "activation", stage, microbatch)
        elif letter != "W":
            source = _end(plan, "gradient", stage, microbatch)
            sink = _end(plan, "gradient", stage - 1, microbatch)
        return Instruction(
            action,
            source,
            sink,
            split=(stage, microbatch) in split,
            completes_stage=action == last_of[stage],
            peer=global_rank(source.channel.sender) if isinstance(source, Remote) else None,
            is_paired=place in pairs,
        )

    program = tuple(map(instruction, range(len(plan.actions)), plan.actions))
    _check_channels(plan, program)
    return program


def forwards(program: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """The F's of a rank's list, in its order: an evaluation runs these.

    An F depends only on F's, so they are executable if the plan is. Both ends of a channel leave out its
    gradients (:func:`activations`), so they still agree on its order.
    """
    return tuple(i for i in program if i.action.letter == "F")


def activations(channel: Channel) -> Channel:
    """What an evaluation sends on a channel: its activations, in their order."""
    return replace(channel, transfers=tuple(t for t in channel.transfers if t.kind == "activation"))


def producer_of(action: Action) -> tuple[int, bool, int]:
    """The producer of an action's input: its stage, whether it is an F, and its microbatch."""
    is_forward = action.letter == "F"
    return action.stage + (-1 if is_forward else 1), is_forward, action.microbatch


def _end(plan: RankPlan, kind: TransferKind, boundary: int, microbatch: int) -> Remote | Local | None:
    """Where the tensor of a boundary travels; None before the first and after the last stage."""
    if not 0 <= boundary < plan.placement.n_stages - 1:
        return None
    transfer = Transfer(kind, boundary, microbatch)
    above, below = plan.placement.rank_of[boundary : boundary + 2]
    if above == below:
        return Local(transfer)
    sender, receiver = (above, below) if kind == "activation" else (below, above)
    return Remote(ChannelKey(sender, receiver), transfer)


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
    for place in plan.pairs:
        first, *second = plan.actions[place : place + 2]
        # A backward needs the F's of its microbatch, on this rank and on others.
        if first.letter != "F" or not second or second[0].letter not in "IB" or first[2] == second[0][2]:
            raise InvalidRun(
                f"rank {plan.rank}: action {first} is paired with {second[0] if second else 'nothing'}. A "
                f"pair is an F, and then an I or B of another microbatch. Check the plan with `zbv check`."
            )
    _check_copies(plan)


def _check_copies(plan: RankPlan) -> None:
    """Check that what is copied leaves between its F and its backward, and comes back."""
    at = {
        (a.stage, a.microbatch, "F" if a.letter == "F" else "B"): n
        for n, a in enumerate(plan.actions)
        if a.letter != "W"
    }
    paired = {place + half for place in plan.pairs for half in (0, 1)}
    copied: defaultdict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for place, (stage, letter, microbatch) in plan.copies:
        copied[stage, microbatch].append((place, letter))
    for (stage, microbatch), entries in copied.items():
        forward, backward = (at.get((stage, microbatch, letter), -1) for letter in "FB")
        places = [place for place, _ in entries]
        letters = "".join(letter for _, letter in entries)
        is_in_order = forward < places[0] and places == sorted(places) and places[-1] <= backward
        if letters != "ODR" or not is_in_order or {forward, backward} & paired:
            raise InvalidRun(
                f"rank {plan.rank}: the copies of stage {stage}, microbatch {microbatch} are {letters}, or "
                f"not between its F and its backward, or these are in pairs. Copies are one O, D and R in "
                f"this order. Check the plan with `zbv check`."
            )


def _check_channels(plan: RankPlan, program: Iterable[Instruction]) -> None:
    sent: defaultdict[ChannelKey, list[Transfer]] = defaultdict(list)
    received: defaultdict[ChannelKey, set[Transfer]] = defaultdict(set)
    for instruction in program:
        if isinstance(instruction.sink, Remote):
            sent[instruction.sink.channel].append(instruction.sink.transfer)
        if isinstance(instruction.source, Remote):
            received[instruction.source.channel].add(instruction.source.transfer)
    stated = {key_of(channel): channel.transfers for channel in plan.channels}

    def is_wrong(key: ChannelKey) -> bool:
        transfers = stated.get(key, ())
        if key in sent:
            return list(transfers) != sent[key]
        return not transfers or len(transfers) != len(received[key]) or set(transfers) != received[key]

    wrong = [str(key) for key in sorted({*stated, *sent, *received}) if is_wrong(key)]
    if wrong:
        raise InvalidRun(
            f"rank {plan.rank}: the plan's channels ({', '.join(wrong)}) do not carry what its actions send "
            f"and receive. Fetch the plan again from the service that made it."
        )


_REMEDY = (
    "Plan with this model's layers (`zbv-worker estimate`), or pass the --model-args of the plan's model"
)


def require_layers(model: PipelineModel | Layered, cut: PlannedCut, remedy: str = _REMEDY) -> None:
    """Check that the plan's layers are the model's; raises :class:`InvalidRun` if not.

    Parameters
    ----------
    remedy
        What to do, for the error.
    """
    if cut.partition is None:
        return
    planned = [name for names in cut.partition for name in names]
    own = list(layer_names(require_layered(model, "the plan assigns layers to stages")))
    if planned != own:
        raise InvalidRun(
            f"the plan's partition belongs to another model: {_difference(planned, own)}. A partition must "
            f"list all layers of the model in order. {remedy}."
        )


def require_layered(model: PipelineModel | Layered, why: str = "layers were requested") -> Layered:
    """Return a model that has layers; raises :class:`InvalidRun` for others."""
    if isinstance(model, Layered):
        return model
    raise InvalidRun(
        f"{why}, but --model gives a {type(model).__name__} without layer_names and build_layers; see "
        f"zbv_worker.model.Layered. Add these methods, or plan without layers."
    )


def _difference(planned: Sequence[str], own: Sequence[str]) -> str:
    """Describe the first difference between two lists of names."""
    at = next(
        (place for place, (a, b) in enumerate(zip(planned, own, strict=False)) if a != b),
        min(len(planned), len(own)),
    )
    found = [repr(names[at]) if at < len(names) else "nothing" for names in (planned, own)]
    return f"at layer {at} it has {found[0]}, the model {found[1]}"
