"""Orders with pairs: forwards that run together with the backward after them, where that shortens an order.

DualPipeV and Megatron-Core's 1F1B are made for pairs: in their steady state every F is next to a backward of
another microbatch. Their backwards are fused, which makes ramps long, so they are also tried with I and W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from zbv_solver.construct.baselines import INTERLEAVED_OVERLAP, missing, order_of
from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import B, F, I, Problem, W
from zbv_solver.timing.start_times import earliest_times, objective_of

_MADE_FOR_PAIRS = {"v": "dualpipe-v", "loop": INTERLEAVED_OVERLAP, "single": "1f1b-overlap"}
"""By kind of placement."""
MOST_TIMED = 20_000_000
"""Actions that are timed at most while pairs are chosen: about two seconds."""


def starts(problem: Problem) -> Iterator[tuple[str, Orders]]:
    """Orders whose forwards are next to backwards, by name; they may exceed the memory limit."""
    placement = problem.placement
    name = _MADE_FOR_PAIRS[placement.kind]
    if not problem.is_equal or missing(name, problem):
        return
    orders = order_of(name, placement, problem.microbatches)
    yield name, orders
    yield f"{name}, split", _split(orders)


def _split(orders: Orders) -> Orders:
    """The orders with an I and its W in the place of every B."""
    is_whole = orders.letter == B
    row = np.stack([orders.stage, np.where(is_whole, I, orders.letter), orders.microbatch], axis=1)
    rows = np.repeat(row, 1 + is_whole, axis=0)
    rows[np.cumsum(1 + is_whole)[is_whole] - 1, 1] = W
    offset = np.concatenate([[0], np.cumsum(1 + is_whole)])[orders.offset].tolist()
    return Orders.of_rows([rows[begin:end].astype(np.int32) for begin, end in pairwise(offset)])


def joined(problem: Problem, orders: Orders) -> Orders:
    """The orders with a pair wherever an F is followed by a backward, as far as no pair lengthens them.

    All pairs are tried together; if they do not help, the earlier and the later half of them, and so on.

    Raises :class:`InvalidPlan` when the orders deadlock without pairs.
    """
    best, chosen = objective_of(problem, orders), np.zeros(len(orders), dtype=np.bool_)
    start, _ = earliest_times(problem, orders)
    places = _neighbours(orders)
    waiting = [places[np.argsort(start[places], kind="stable")]]
    left = MOST_TIMED
    while waiting and left > 0:
        tried = waiting.pop()
        paired = chosen.copy()
        paired[tried] = True
        value = _value(problem, replace(orders, paired=paired)) if len(tried) else math.inf
        if value <= best:
            best, chosen = value, paired
        elif len(tried) > 1:
            half = len(tried) // 2
            waiting += [tried[half:], tried[:half]]
        left -= len(orders)
    return replace(orders, paired=chosen) if chosen.any() else orders


def _neighbours(orders: Orders) -> IntArray:
    """Every F that is followed by an I or B of another microbatch on its rank, with no copy between them."""
    letter, microbatch, rank = orders.letter, orders.microbatch, orders.rank_index()
    follows = (letter[1:] == I) | (letter[1:] == B)
    other = (microbatch[1:] != microbatch[:-1]) & (rank[1:] == rank[:-1])
    if orders.copies is not None:
        other[np.maximum(orders.copies[:, 0] - 1, 0)] = False
    return np.flatnonzero((letter[:-1] == F) & follows & other)


def _value(problem: Problem, orders: Orders) -> float:
    """The objective; infinite if the orders deadlock."""
    try:
        return objective_of(problem, orders)
    except InvalidPlan:
        return math.inf
