"""The orders that executors keep: which there are, what they require, and their action lists.

Rules of a cut name ranks: ``cut.first``, ``last`` and ``allow_empty``. Megatron-LM's first and last pipeline
stages are ranks, too, and it deals their transformer layers evenly over their virtual stages
(``__post_init__`` in ``megatron/core/transformer/transformer_config.py``, ``get_num_layers_to_build`` in
``megatron/core/transformer/transformer_block.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from zbv_solver.construct import classical
from zbv_solver.construct.classical import Actions, Rows
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.stages import Placement, PlacementKind


@dataclass(frozen=True)
class Schedule:
    """A fixed order of an executor, for any costs."""

    executor: str
    """``megatron`` or ``torch``."""
    name: str
    """Its name in the executor's settings."""
    placement: Placement
    microbatches: int
    group: int | None = None
    """Megatron-LM's ``microbatch_group_size_per_vp_stage``; None for schedules without it."""
    read: Orders | None = field(default=None, compare=False)
    """The action lists of a schedule that was read from a file; None if they follow from the name."""

    @property
    def is_split(self) -> bool:
        """Whether backwards are split into I and W."""
        return self.name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

    @property
    def blocking(self) -> bool:
        """Whether transfers keep both ranks waiting, as in 1F1B of Megatron-LM.

        ``megatron/training/arguments.py`` turns ``overlap_p2p_comm`` off for it, and
        ``send_forward_recv_backward`` of ``p2p_communication.py`` waits between two actions.
        """
        return self.executor == "megatron" and self.placement.chunks == 1

    def document(self) -> dict[str, str | int | None]:
        """What identifies it in a JSON document."""
        return {"schedule": self.name, "virtual_stages": self.placement.chunks, "group_size": self.group}

    def orders(self) -> Orders:
        """The action list of every rank."""
        if self.read is not None:
            return self.read
        p, m, chunks = self.placement.pp_degree, self.microbatches, self.placement.chunks
        if self.group is not None:
            rows = [classical.interleaved_1f1b(rank, p, m, chunks, self.group) for rank in range(p)]
        else:
            make = _MAKERS[self.name]
            rows = [np.asarray(make(rank, p, m, chunks), dtype=np.int32) for rank in range(p)]
        return Orders.of_rows(rows)


_MAKERS: dict[str, Callable[[int, int, int, int], Rows | Actions]] = {
    "GPipe": lambda rank, p, m, chunks: classical.gpipe(rank, p, m),
    "1F1B": lambda rank, p, m, chunks: classical.one_f_one_b(rank, p, m),
    "Interleaved1F1B": classical.interleaved_1f1b,
    "LoopedBFS": classical.looped_bfs,
    "InterleavedZeroBubble": classical.interleaved_zb_h1,
    "ZBVZeroBubble": lambda rank, p, m, chunks: classical.zbv(rank, p, m),
    "DualPipeV": lambda rank, p, m, chunks: classical.dualpipe_v(rank, p, m),
}
_KINDS: dict[str, PlacementKind] = {
    "GPipe": "single",
    "1F1B": "single",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
"""The placement of a schedule of PyTorch; all others are loops."""
TORCH_SCHEDULES = tuple(_MAKERS)
TORCH_DEFAULTS = ("1F1B", "Interleaved1F1B")
"""The schedules of PyTorch that are tried unless others are named: those with fused backwards, which work
with torch.compile and with activation checkpointing."""


def megatron_schedule(p: int, m: int, chunks: int, group: int | None = None) -> Schedule:
    """Megatron-LM's 1F1B (one chunk) or interleaved 1F1B.

    The rules are those of ``forward_backward_pipelining_with_interleaving`` in
    ``megatron/core/pipeline_parallel/schedules.py``, and of ``megatron/training/arguments.py``.

    Parameters
    ----------
    group
        Microbatches that a chunk runs before the next chunk; None is p, Megatron-LM's default.

    Raises
    ------
    InvalidInput
        When Megatron-LM refuses these numbers.
    """
    if chunks == 1:
        if group is not None:
            raise InvalidInput.at("", f"found group size {group} with one chunk; only several take turns.")
        return Schedule("megatron", "1F1B", Placement.of("single", p), m)
    if p < 2:
        raise InvalidInput.at("", f"found {p} ranks; Megatron-LM interleaves on at least 2.")
    size = p if group is None else group
    if not p <= size <= m:
        raise InvalidInput.at(
            "",
            f"found group size {size}; Megatron-LM needs at least one microbatch per rank ({p}) and at most "
            f"all {m}.",
        )
    if 0 < m % size < p:
        raise InvalidInput.at(
            "",
            f"found group size {size} for {m} microbatches; the last group has {m % size}, and Megatron-LM "
            f"needs 0 or at least {p}.",
        )
    return Schedule("megatron", "interleaved-1F1B", Placement.of("loop", p, chunks), m, size)


def megatron_groups(p: int, m: int, chunks: int) -> tuple[int | None, ...]:
    """The group sizes that Megatron-LM allows; (None,) for one chunk."""
    if chunks == 1:
        return (None,)
    return tuple(size for size in range(p, m + 1) if not 0 < m % size < p)


def torch_schedule_name(name: str) -> str:
    """PyTorch's spelling of a schedule's name; raises :class:`InvalidInput` for an unknown one."""
    known = {each.lower(): each for each in TORCH_SCHEDULES}
    if name.lower() not in known:
        raise InvalidInput.at("", f"found schedule {name!r}; must be one of {', '.join(TORCH_SCHEDULES)}.")
    return known[name.lower()]


def torch_schedule(name: str, p: int, m: int, chunks: int | None = None) -> Schedule:
    """A schedule of ``torch.distributed.pipelining``, by the name that ``get_schedule_class`` takes.

    Parameters
    ----------
    chunks
        Stages per rank; None is 1 or 2, as the schedule needs.

    Raises
    ------
    InvalidInput
        When there is no such schedule, or PyTorch refuses these numbers.
    """
    name = torch_schedule_name(name)
    kind = _KINDS.get(name, "loop")
    placement = Placement.of(kind, p, chunks)
    stages, rounds = placement.n_stages, max(1, m // p)
    rules: Sequence[tuple[bool, str]] = (
        (
            kind == "loop" or placement.chunks == (2 if kind == "v" else 1),
            "needs 2 stages per rank in a V, and 1 in 1F1B and GPipe",
        ),
        (name != "1F1B" or m >= p, f"needs at least {p} microbatches, one per stage"),
        (name != "DualPipeV" or m >= stages, f"needs at least {stages} microbatches, one per stage"),
        (
            not name.startswith("Interleaved") or m % rounds == 0,
            f"runs {rounds} equal rounds, so the number of microbatches must be a multiple of {rounds}",
        ),
    )
    for is_kept, rule in rules:
        if not is_kept:
            raise InvalidInput.at(
                "",
                f"found {m} microbatches and {placement.chunks} stages on each of {p} ranks; {name} {rule}.",
            )
    return Schedule("torch", name, placement, m)


def placed_on(problem: LayeredProblem, schedule: Schedule, allow_empty: bool) -> LayeredProblem:
    """The layers on a schedule's placement, with rules of stages in place of those of ranks.

    Parameters
    ----------
    allow_empty
        Whether the executor allows empty stages.

    Raises
    ------
    InvalidInput
        When no cut under this schedule keeps the rules, with the reason.
    """
    placement, rules = schedule.placement, problem.rules
    p, chunks = placement.pp_degree, placement.chunks
    if p != problem.pp_degree or schedule.microbatches != problem.microbatches:
        raise InvalidInput.at(
            "",
            f"found a schedule for {p} ranks and {schedule.microbatches} microbatches; the problem has "
            f"{problem.pp_degree} and {problem.microbatches}.",
        )
    rules = replace(rules, allow_empty=allow_empty and rules.allow_empty is not False)
    if placement.kind != "v":
        if lost := problem.rules.contradiction(problem.model, p, "ranks"):
            raise InvalidInput.at("/cut", lost)
        rules = replace(
            rules, first=_share("first", rules.first, chunks), last=_share("last", rules.last, chunks)
        )
        if chunks > 1 and not rules.allow_empty and 0 in (rules.first, rules.last):
            name = "first" if rules.first == 0 else "last"
            raise InvalidInput.at(
                f"/cut/{name}",
                f"found 0 transformer layers on the {name} rank, which has {chunks} virtual stages; one of "
                f"them would be empty. Give at least {chunks}, or use one virtual stage.",
            )
    return replace(
        problem,
        placement=placement.kind,
        chunks=chunks if placement.kind == "loop" else None,
        rules=rules,
        blocking=problem.blocking or schedule.blocking,
    )


def _share(name: str, count: int | None, chunks: int) -> int | None:
    """The transformer layers of one stage of the first or the last rank."""
    if count is None:
        return None
    share, rest = divmod(count, chunks)
    if rest:
        raise InvalidInput.at(
            f"/cut/{name}",
            f"found {count} transformer {'layer' if count == 1 else 'layers'} on the {name} rank, which has "
            f"{chunks} virtual stages; they must divide evenly. Give a multiple of {chunks}, or other "
            "virtual stages.",
        )
    return share


def inner_sizes(placed: LayeredProblem, schedule: Schedule) -> dict[int, int]:
    """The prescribed numbers of parts of stages other than the first and the last one.

    Raises :class:`InvalidInput` when parts have several transformer layers, so that sizes prescribe too much.
    """
    placement, rules = schedule.placement, placed.rules
    ends = [(0, rules.first), (placement.pp_degree - 1, rules.last)]
    if placement.kind != "loop":
        return {}
    inner = range(1, placement.n_stages - 1)
    found = {
        stage: size
        for rank, size in ends
        if size is not None
        for stage in placement.stages_of[rank]
        if stage in inner
    }
    if found and np.diff(np.array(placed.model.blocks_before)[placed.places]).max() > 1:
        raise InvalidInput.at(
            "/cut/together",
            "found groups of several transformer layers, with cut.first or cut.last and several virtual "
            "stages. Remove one of these rules, or use one virtual stage.",
        )
    return found


MOST_CHUNKS = 4
"""Most virtual stages per rank that are tried unless numbers are given."""
MOST_GROUPS = 4
"""Group sizes that are tried unless one is given: all if there are no more, else those that double from p."""


def schedules_of(
    problem: LayeredProblem,
    executor: str,
    virtual_stages: Sequence[int] | None = None,
    group: int | None = None,
    names: Sequence[str] = (),
) -> list[Schedule]:
    """The schedules to try; raises :class:`InvalidInput` with the executor's reasons if there are none."""
    p, m = problem.pp_degree, problem.microbatches
    chunks = tuple(virtual_stages or range(1, MOST_CHUNKS + 1))
    found: list[Schedule] = []
    refusals: list[InvalidInput] = []

    def offer(make: Any, *arguments: Any) -> None:
        try:
            found.append(make(*arguments))
        except InvalidInput as error:
            refusals.append(error)

    if executor == "megatron":
        for each in chunks:
            if each == 1:
                # A given group size is for several virtual stages.
                if group is None or virtual_stages is not None:
                    offer(megatron_schedule, p, m, 1)
            elif group is not None:
                offer(megatron_schedule, p, m, each, group)
            else:
                sizes = _tried_groups(p, m, each)
                for size in sizes:
                    offer(megatron_schedule, p, m, each, size)
                if not sizes:
                    offer(megatron_schedule, p, m, each)
    else:
        for name in names or TORCH_DEFAULTS:
            for each in chunks:
                offer(torch_schedule, name, p, m, each)
    if not names:
        # With one stage per rank, an interleaved schedule is 1F1B with a longer warm-up.
        found = [each for each in found if each.name == "1F1B" or each.placement.chunks > 1]
    if not found:
        raise refusals[0] if refusals else InvalidInput.at("", "found no schedule to try.")
    return found


def _tried_groups(p: int, m: int, chunks: int) -> Sequence[int | None]:
    allowed = megatron_groups(p, m, chunks)
    if len(allowed) <= MOST_GROUPS:
        return allowed
    return [size for size in allowed if size is not None and size % p == 0 and (size // p).bit_count() == 1][
        :MOST_GROUPS
    ]
