"""The node list of the zero-bubble fork of Megatron-LM (Qi et al. 2023 and 2024), as JSON.

``nodes`` holds one list per rank, its entries with the fields of that fork's ``ScheduledNode`` (module
``megatron.core.pipeline_parallel.zerobubble.scheduler.graph``), ready for ``ScheduledNode(**node)`` once
``type`` is made a ``FuncType``. Communication is not in it: the fork's own passes derive it from the times
and peers that the nodes carry.

The words differ. There a *stage* is a rank, a *layer group* is a stage, ``B`` is the backward of the input
gradient alone (I here), and ``BW`` is the full backward (B here). And there a backward looks for one of its
own type in the next layer group, so a microbatch's backwards are all BW or none: those that mix B with I are
written as B and W in succession.

If microbatches differ, ``batch_order`` lists the plan's microbatches in the order in which the fork must get
them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from zbv_solver.documents.text import number
from zbv_solver.export.torch_csv import batch_order, renumbered
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import LETTERS, B, I, Problem, W
from zbv_solver.timing.start_times import earliest_times
from zbv_solver.verify.verifier import verify_orders

TYPES = {"F": "F", "I": "B", "W": "W", "B": "BW"}
"""The fork's names of our letters."""


def render(plan: Plan) -> str:
    """The plan as the fork's node list.

    Raises
    ------
    InvalidPlan
        When a backward must be written as B and W in succession and its rank's memory limit has no room for
        what its B holds.
    """
    problem, orders = renumbered(plan.problem, without_mixed_backwards(plan.orders, plan.problem))
    order = batch_order(plan)
    verify_orders(problem, orders)
    document = {
        "format": "megatron-zero-bubble-nodes",
        "plan_id": plan.plan_id,
        "time_unit": problem.units.time,
        "n_stages": problem.pp_degree,
        "n_micro": problem.microbatches,
        "max_chunks": problem.placement.chunks,
        **({"batch_order": order} if order is not None else {}),
    }
    head = json.dumps(document, ensure_ascii=False)[1:-1]
    ranks = [",\n".join(map(json.dumps, nodes)) for nodes in _nodes(problem, orders)]
    body = "],\n[".join(ranks)
    return f'{{{head}, "nodes": [\n[{body}]\n]}}\n'


def without_mixed_backwards(orders: Orders, problem: Problem) -> Orders:
    """The same orders where every microbatch's backwards are all B or all I and W."""
    split = np.zeros(problem.microbatches, dtype=np.bool_)
    split[orders.microbatch[orders.letter == I]] = True
    rows = np.stack([orders.stage, orders.letter.astype(np.int32), orders.microbatch], axis=1)
    mixed = (orders.letter == B) & split[orders.microbatch]
    copies = np.where(mixed, 2, 1)
    rows = np.repeat(rows, copies, axis=0)
    first = np.cumsum(copies) - copies
    rows[first[mixed], 1], rows[first[mixed] + 1, 1] = I, W
    bounds = np.concatenate([[0], np.cumsum(copies)])[orders.offset]
    return Orders.of_rows(np.split(rows, bounds[1:-1]))


def _nodes(problem: Problem, orders: Orders) -> list[list[dict[str, Any]]]:
    start, end = (times.tolist() for times in earliest_times(problem, orders))
    nodes = []
    for rank in range(orders.pp_degree):
        at = orders.slice_of(rank)
        rows = zip(
            orders.stage[at].tolist(),
            orders.letter[at].tolist(),
            orders.microbatch[at].tolist(),
            start[at],
            end[at],
            strict=True,
        )
        nodes.append([_node(problem.placement, rank, *row) for row in rows])
    return nodes


def _node(
    placement: Placement, rank: int, stage: int, code: int, microbatch: int, start: float, end: float
) -> dict[str, Any]:
    letter = LETTERS[code]
    before, after = (stage - 1, stage + 1) if letter == "F" else (stage + 1, stage - 1)
    communicates = letter != "W"
    return {
        "type": TYPES[letter],
        "stage": rank,
        "microbatch": microbatch,
        "chunk": placement.chunk_of[stage],
        "seq_split_idx": 0,
        "layer_group_idx": stage,
        "start_time": number(start),
        "completion_time": number(end),
        "recv_peer_stage": _peer(placement, rank, before) if communicates else None,
        "send_peer_stage": _peer(placement, rank, after) if communicates else None,
    }


def _peer(placement: Placement, rank: int, stage: int) -> int | None:
    """The rank of a neighbouring stage; None if there is no such stage or it is on this rank."""
    if not 0 <= stage < placement.n_stages or placement.rank_of[stage] == rank:
        return None
    return placement.rank_of[stage]
