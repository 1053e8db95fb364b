"""The orders that executors keep: which there are, what they require, and their action lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from zbv_solver.construct import baselines, torch_schedules
from zbv_solver.construct.baselines import Rows
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.placement import Placement, PlacementKind


@dataclass(frozen=True)
class Schedule:
    """A fixed order of an executor, for any costs.

    Attributes
    ----------
    executor
        ``megatron`` or ``torch``.
    name
        Its name in the executor's settings.
    group
        Megatron-LM's ``microbatch_group_size_per_vp_stage``; None for schedules without it.
    read
        The action lists of a schedule that was read from a file; None if they follow from the name.
    """

    executor: str
    name: str
    placement: Placement
    microbatches: int
    group: int | None = None
    read: Orders | None = field(default=None, compare=False)

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

    def orders(self) -> Orders:
        """The action list of every rank."""
        if self.read is not None:
            return self.read
        p, m, chunks = self.placement.pp_degree, self.microbatches, self.placement.chunks
        if self.group is not None:
            rows = [baselines.interleaved_1f1b(rank, p, m, chunks, self.group) for rank in range(p)]
        else:
            make = _MAKERS[self.name]
            rows = [_rows(make(rank, p, m, chunks)) for rank in range(p)]
        return Orders.of_rows(rows)


_MAKERS: dict[str, Callable[[int, int, int, int], Rows | torch_schedules.Actions]] = {
    "GPipe": lambda rank, p, m, chunks: baselines.gpipe(rank, p, m),
    "1F1B": lambda rank, p, m, chunks: baselines.one_f_one_b(rank, p, m),
    "Interleaved1F1B": baselines.interleaved_1f1b,
    "LoopedBFS": torch_schedules.looped_bfs,
    "InterleavedZeroBubble": baselines.interleaved_zb_h1,
    "ZBVZeroBubble": lambda rank, p, m, chunks: torch_schedules.zbv(rank, p, m),
    "DualPipeV": lambda rank, p, m, chunks: torch_schedules.dualpipe_v(rank, p, m),
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


def _rows(actions: Rows | torch_schedules.Actions) -> Rows:
    return np.asarray(actions, dtype=np.int32)


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
