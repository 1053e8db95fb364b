"""CSV for PyTorch's ``torch.distributed.pipelining``: compute-only files written, and all kinds read.

One row per rank, no header, actions in execution order, as ``_PipelineScheduleRuntime._load_csv(path,
format="compute_only")`` reads them; PyTorch adds the communication and infers the placement from the rows.
``_dump_csv`` writes files with communication by default, and ``OVERLAP_F_B`` for a forward and a backward
that run together (``torch/distributed/pipelining/schedules.py``, ``_Action``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, F, Problem
from zbv_solver.problem.stages import Placement, PlacementKind


def render(plan: Plan) -> str:
    """The plan as compute-only CSV, microbatches relabelled as :func:`relabelled` says.

    PyTorch runs the two actions of a pair one after the other, unless the user registers a function for
    ``OVERLAP_F_B``.
    """
    orders = relabelled(plan.orders, plan.problem.n_stages)
    return "".join(",".join(map(_cell, orders.text(rank))) + "\n" for rank in range(orders.pp_degree))


def _cell(text: str) -> str:
    first, plus, second = text.partition("+")
    return f"({first};{second})OVERLAP_F_B" if plus else first


def relabelled(orders: Orders, n_stages: int) -> Orders:
    """The same orders with microbatches renumbered so that the last stage's forwards run in order 0 … m-1.

    PyTorch appends losses in run order but looks them up by microbatch: any other order gives wrong
    gradients and no error. Equal microbatches are interchangeable, so a permutation changes nothing else. If
    they differ, the batch must be given in the order :func:`batch_order`.
    """
    label = microbatch_labels(orders, n_stages)
    return orders.renamed(label)


def renumbered(problem: Problem, orders: Orders) -> tuple[Problem, Orders]:
    """:func:`relabelled` orders with their problem, in which every microbatch keeps its features."""
    order = np.argsort(microbatch_labels(orders, problem.n_stages)).tolist()
    features = tuple(
        replace(each, value=tuple(each.value[microbatch] for microbatch in order))
        for each in problem.features
    )
    orders = relabelled(orders, problem.n_stages)
    return replace(problem, features=features) if features else problem, orders


def batch_order(plan: Plan) -> list[int] | None:
    """The plan's microbatches in the order of the exported numbers; None if the order does not matter."""
    if plan.problem.is_equal:
        return None
    order: list[int] = np.argsort(microbatch_labels(plan.orders, plan.problem.n_stages)).tolist()
    return None if order == sorted(order) else order


def microbatch_labels(orders: Orders, n_stages: int) -> NDArray[np.int32]:
    """New number of every microbatch (m,): its position among the last stage's forwards."""
    last_forwards = (orders.stage == n_stages - 1) & (orders.letter == F)
    in_run_order = orders.microbatch[last_forwards]
    label = np.empty(len(in_run_order), dtype=np.int32)
    label[in_run_order] = np.arange(len(in_run_order), dtype=np.int32)
    return label


@dataclass(frozen=True, eq=False)
class TorchSchedule:
    """A schedule that was read from a file."""

    placement: Placement
    microbatches: int
    orders: Orders
    """The actions of every rank, and the overlapped pairs of them."""
    communication: tuple[tuple[str, ...], ...] | None
    """The entries of every rank in order, if the file has sends or receives, which a single rank never needs;
    a pair is two entries."""
    renamed: int
    """Number of backwards ``B`` that are read as ``I``, because there is a separate ``W``."""
    from_one: bool
    """Whether the last rank numbers its forwards from 1; they are read as numbered from 0."""


_Entry = tuple[int, str, int]
"""Stage, name, and microbatch (-1 if there is none)."""
_ENTRY = re.compile(
    r"(?P<stage>0|[1-9]\d{0,8})"
    r"(?:(?P<name>F|I|B|W|BW|SEND_F|RECV_F|SEND_B|RECV_B)(?P<microbatch>0|[1-9]\d{0,8})"
    r"|(?P<once>UNSHARD|RESHARD|REDUCE_GRAD))"
)
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_ACTION = re.compile(r"[,(\s]*\d")


def is_torch_csv(name: str, text: str) -> bool:
    """Whether a file has the name of a CSV file, or begins like a schedule; JSON documents do neither."""
    return name.lower().endswith(".csv") or _ACTION.match(text) is not None


def parse(text: str) -> TorchSchedule:
    """Read a schedule, with or without communication.

    In files of PyTorch before 2.6, ``B`` is the gradient of the input if the same microbatch has a ``W``, and
    ``BW`` is the full backward. ``Schedule1F1B._get_pipeline_order`` numbers the forwards of the last rank
    from 1, up to PyTorch 2.13 at least.

    Raises
    ------
    InvalidInput
        When an entry is unknown, or the stages have no placement that zbv plans.
    """
    rows, pairs = [], set()
    for rank, cells in enumerate(csv.reader(text.removeprefix("\ufeff").rstrip().splitlines())):
        row: list[_Entry] = []
        for at, cell in enumerate(cells):
            entries = _entries(cell.strip(), f"row {rank + 1}, entry {at + 1}")
            if len(entries) == 2:
                pairs.add((rank, len(row)))
            row += entries
        rows.append(row)
    split = {(stage, batch) for row in rows for stage, name, batch in row if name == "W"}
    renamed = 0
    for row in rows:
        for at, (stage, name, batch) in enumerate(row):
            is_input = name == "B" and (stage, batch) in split
            renamed += is_input
            if is_input or name == "BW":
                row[at] = stage, "I" if is_input else "B", batch
    from_one = bool(rows) and _is_from_one(rows[-1])
    if from_one:
        rows[-1] = [(stage, name, batch - (name == "F")) for stage, name, batch in rows[-1]]
    actions = [[entry for entry in row if entry[1] in LETTERS] for row in rows]
    orders = Orders.from_actions(actions)
    if pairs:
        places = (
            (rank, at) for rank, row in enumerate(rows) for at in range(len(row)) if row[at][1] in LETTERS
        )
        orders = replace(orders, paired=np.array([place in pairs for place in places]))
    # torch writes REDUCE_GRAD for 1F1B and GPipe, and no transfers.
    names = {name for row in rows for _, name, _ in row}
    has_communication = any(
        name.startswith(("SEND", "RECV")) or (len(rows) == 1 and name not in LETTERS) for name in names
    )
    return TorchSchedule(
        _placement(actions),
        1 + max(batch for row in actions for _, _, batch in row),
        orders,
        tuple(tuple(map(_text, row)) for row in rows) if has_communication else None,
        renamed,
        from_one,
    )


def _is_from_one(row: Sequence[_Entry]) -> bool:
    """Whether a rank runs the forwards 1, 2, … m and the backwards 0, 1, … m-1 of one stage."""
    forwards = [batch for _, name, batch in row if name == "F"]
    backwards = [batch for _, name, batch in row if name == "B"]
    m, names = len(forwards), {name for _, name, _ in row}
    is_single = len({stage for stage, _, _ in row}) == 1 and names <= {"F", "B", "REDUCE_GRAD"}
    return is_single and m > 0 and forwards == [*range(1, m + 1)] and backwards == [*range(m)]


def _entries(cell: str, where: str) -> list[_Entry]:
    """The entries of a cell: none if it is empty, and two of an overlapped pair, F first."""
    if not cell:
        return []
    pair = _PAIR.fullmatch(cell)
    parts = [_ENTRY.fullmatch(part.strip()) for part in (pair.groups() if pair else (cell,))]
    entries = [
        (int(part["stage"]), part["name"] or part["once"], int(part["microbatch"] or -1))
        for part in parts
        if part is not None
    ]
    if len(entries) < len(parts) or (pair and {name for _, name, _ in entries} not in _PAIRED):
        raise InvalidInput.at(
            "",
            f"{where}: found {cell[:60]!r}; an entry is a stage, an action and a microbatch, as in 0F3 or "
            f"1RECV_F0, or a forward and a backward that run together, as in (0F5;3B2)OVERLAP_F_B.",
        )
    return sorted(entries, key=lambda entry: entry[1] != "F")


_PAIRED = ({"F", "B"}, {"F", "I"}, {"F", "BW"})


def _text(entry: _Entry) -> str:
    stage, name, batch = entry
    return f"{stage}{name}{batch if batch >= 0 else ''}"


def _placement(rows: Sequence[Iterable[_Entry]]) -> Placement:
    """The placement of the stages on the ranks."""
    hosted = [{stage for stage, _, _ in row} for row in rows]
    p, n = len(hosted), sum(map(len, hosted))
    chunks, rest = divmod(n, max(p, 1))
    if not n or rest or set().union(*hosted) != set(range(n)):
        raise InvalidInput.at(
            "",
            f"found {n} stages on {p} ranks, one row per rank; every rank has equally many, every stage is "
            f"on one rank, and stages are numbered from 0.",
        )
    kinds: dict[int, tuple[PlacementKind, ...]] = {1: ("single",), 2: ("v", "loop")}
    for kind in kinds.get(chunks, ("loop",)):
        placement = Placement.of(kind, p, chunks)
        if [set(stages) for stages in placement.stages_of] == hosted:
            return placement
    raise InvalidInput.at(
        "",
        f"found stages {sorted(hosted[0])} on rank 0 of {p}; zbv plans one stage per rank, loops (stage s on "
        f"rank s mod {p}), and a V of two stages per rank.",
    )
