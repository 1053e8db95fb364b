"""Compute-only CSV for PyTorch's ``torch.distributed.pipelining``.

One row per rank, no header, actions in execution order, as ``_PipelineScheduleRuntime._load_csv(path,
format="compute_only")`` reads them; PyTorch adds the communication and infers the placement from the rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import F, Problem


def render(plan: Plan) -> str:
    """The plan as compute-only CSV, microbatches relabelled as :func:`relabelled` says."""
    orders = relabelled(plan.orders, plan.problem.n_stages)
    return "".join(",".join(orders.text(rank)) + "\n" for rank in range(orders.pp_degree))


def relabelled(orders: Orders, n_stages: int) -> Orders:
    """The same orders with microbatches renumbered so that the last stage's forwards run in order 0 … m-1.

    PyTorch appends losses in run order but looks them up by microbatch: any other order gives wrong
    gradients and no error. Equal microbatches are interchangeable, so a permutation changes nothing else. If
    they differ, the batch must be given in the order :func:`batch_order`.
    """
    label = microbatch_labels(orders, n_stages)
    return Orders(orders.stage, orders.letter, label[orders.microbatch], orders.offset)


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
