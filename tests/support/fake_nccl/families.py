"""Plans of every family that zbv makes or compares with, by name and size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import cast

from zbv_solver.construct.baselines import baseline
from zbv_solver.construct.greedy_v import get_v_schedule
from zbv_solver.construct.pairs import joined, starts
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import Costs, Memory, Placement, PlacementKind
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_worker.transport.channels import key_of
from zbv_worker.transport.nccl_operations import kernels_at_once

from support.selfcheck import random_orders

Plan = tuple[Problem, Orders]


def _problem(p: int, m: int, kind: str = "v", chunks: int | None = None) -> Problem:
    """Stages of F = I = W = 1, and transfers of 0.2."""
    placement = Placement.of(cast("PlacementKind", kind), p, chunks)
    ones = (1.0,) * placement.n_stages
    return Problem(
        placement, m, Costs(ones, ones, ones, (0.2,) * (placement.n_stages - 1)), Memory.unlimited(placement)
    )


def _baseline(name: str, p: int, m: int) -> Plan:
    return baseline(name, _problem(p, m))


def _interleaved(chunks: int, p: int, m: int) -> Plan:
    return baseline("interleaved-1f1b", _problem(p, m, "loop", chunks))


def _greedy(p: int, m: int) -> Plan:
    problem = _problem(p, m)
    return problem, next(get_v_schedule(problem)).orders


def _searched(kind: str, chunks: int | None, p: int, m: int) -> Plan:
    problem = _problem(p, m, kind, chunks)
    return problem, search(problem, SearchOptions(effort="quick")).orders


def _random(seed: int, p: int, m: int) -> Plan:
    problem = _problem(p, m)
    return problem, random_orders(problem, Random(seed))


FAMILIES: dict[str, Callable[[int, int], Plan]] = {
    "GPipe": partial(_baseline, "gpipe"),
    "1F1B": partial(_baseline, "1f1b"),
    "eager 1F1B": partial(_baseline, "eager-1f1b"),
    "ZB-H1": partial(_baseline, "zb-h1"),
    "interleaved 1F1B, 2 chunks": partial(_interleaved, 2),
    "interleaved 1F1B, 3 chunks": partial(_interleaved, 3),
    "interleaved 1F1B, 4 chunks": partial(_interleaved, 4),
    "V, greedy": _greedy,
    "V, searched": partial(_searched, "v", None),
    "V, random order": partial(_random, 1),
    "one chunk, searched": partial(_searched, "single", None),
    "loop of 2 chunks, searched": partial(_searched, "loop", 2),
    "loop of 3 chunks, searched": partial(_searched, "loop", 3),
    "loop of 4 chunks, searched": partial(_searched, "loop", 4),
}
"""A family makes a plan for p ranks and m microbatches."""


def _paired(kind: str, p: int, m: int) -> Plan:
    """The orders that are made for pairs, with I and W, and with a pair of all neighbours that gain by it."""
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1, "p2p": 0.2}
    communication = {"forward": 0.4, "backward_input": 0.4}
    problem = parse_problem(
        {
            "pp_degree": p,
            "microbatches": m,
            "placement": kind,
            "costs": {**costs, "communication": communication},
        }
    )
    *_, (_, orders) = starts(problem)
    return problem, joined(problem, orders)


PAIRED_FAMILIES: dict[str, Callable[[int, int], Plan]] = {
    "V, pairs": partial(_paired, "v"),
    "one chunk, pairs": partial(_paired, "single"),
    "loop of 2 chunks, pairs": partial(_paired, "loop"),
}
"""Families whose forwards run together with backwards."""


def stated_kernels(
    plan: Plan, replicas: int = 1, *, sums_over_ranks: bool = False, ties: tuple[tuple[int, ...], ...] = ()
) -> int:
    """How many kernels of NCCL the transport needs to run at once on its busiest rank."""
    keys = {key_of(channel) for channel in channels(*plan)}
    return max(
        kernels_at_once(keys, rank, replicas, sums_over_ranks=sums_over_ranks, ties=ties)
        for rank in range(plan[0].pp_degree)
    )
