"""The rules of copies to the host, and what they add to the precedence graph of the verifier.

Like the verifier, this module shares no code with timing or search. Every copy is a node with the time that
its engine needs, after the copy before it and the entry before its O or R. A D waits for the copy out, and so
does a node before the I or B for the copy in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.numerals import exact
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import COPY_LETTERS, LETTERS, Problem
from zbv_solver.problem.stages import Copies

BACKWARDS = "IB"


class Entry(NamedTuple):
    """An entry of a rank's list: ``at`` is the index of the action, or None for a copy."""

    at: int | None
    letter: str
    stage: int
    microbatch: int

    @property
    def cell(self) -> tuple[int, int]:
        """Stage and microbatch."""
        return self.stage, self.microbatch

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


def entries_of(orders: Orders, rank: int) -> Iterator[Entry]:
    """The entries of a rank in the order of its list."""
    before, own = defaultdict(list), orders.offset[rank : rank + 2]
    if orders.copies is not None:
        first, last = np.searchsorted(orders.copies[:, 0], own)
        for at, letter, stage, microbatch in orders.copies[first:last].tolist():
            before[at].append((letter, stage, microbatch))
    for at in range(*own.tolist()):
        for letter, stage, microbatch in before[at]:
            yield Entry(None, COPY_LETTERS[letter - len(LETTERS)], stage, microbatch)
        yield Entry(at, LETTERS[orders.letter[at]], int(orders.stage[at]), int(orders.microbatch[at]))


def check_copies(problem: Problem, orders: Orders) -> None:
    """Raise :class:`InvalidPlan` when a copy is out of place, or the host has no room.

    The actions are already known to be complete, and each on the rank of its stage.
    """
    rows = orders.copies
    if rows is None:
        return
    copies = problem.copies
    if copies is None:
        raise InvalidPlan("found a copy to the host; the problem must state costs.offload.")
    at, letter, stage, microbatch = rows.T
    known = (
        (stage >= 0) & (stage < problem.n_stages) & (microbatch >= 0) & (microbatch < problem.microbatches)
    )
    known &= (len(LETTERS) <= letter) & (letter < len(LETTERS) + len(COPY_LETTERS))
    if not known.all() or (np.diff(at) < 0).any() or at.min() < 0 or at.max() >= len(orders):
        raise InvalidPlan(
            "found copies of stages or microbatches that the problem does not have, or out of the lists."
        )
    if orders.paired is not None and orders.paired[np.maximum(at - 1, 0)].any():
        raise InvalidPlan("found a copy between the two actions of a pair; it must be before or after them.")
    copied = 0
    for rank in range(orders.pp_degree):
        copied += _check_rank(problem, copies, orders, rank)
    if copied < len(rows):
        raise InvalidPlan("found a copy on another rank than that of its stage.")


def _check_rank(problem: Problem, copies: Copies, orders: Orders, rank: int) -> int:
    """Check the copies of a rank; returns their number."""
    done: dict[tuple[int, int], str] = defaultdict(str)
    limit = np.inf if copies.host_limit is None else copies.host_limit[rank]
    on_host, count = 0.0, 0
    for entry in entries_of(orders, rank):
        if entry.at is None:
            done[entry.cell] += entry.letter
            on_host += copies.offloadable[entry.stage] if entry.letter == "O" else 0.0
            count += 1
            if problem.placement.rank_of[entry.stage] != rank:
                raise InvalidPlan(f"found {entry} on rank {rank}, which does not have stage {entry.stage}.")
        elif entry.letter == "F":
            done[entry.cell] += "F"
        elif entry.letter in BACKWARDS:
            if done[entry.cell] not in ("F", "FODR"):
                found = ", ".join(done[entry.cell])
                raise InvalidPlan(
                    f"{entry} on rank {rank} comes after {found} of its microbatch and stage; it must come "
                    f"after F alone, or after F, O, D and R in this order."
                )
            # The host keeps a copy until the copy in has ended, for which the backward waits.
            on_host -= copies.offloadable[entry.stage] if done[entry.cell] == "FODR" else 0.0
            done[entry.cell] = "done"
        if exceeds(on_host, limit):
            raise InvalidPlan(
                f"rank {rank} has copies of {exact(on_host)} on the host at {entry}; its limit is "
                f"{exact(limit)}."
            )
    late = [cell for cell, letters in done.items() if letters != "done"]
    if late:
        raise InvalidPlan(
            f"rank {rank} copies stage {late[0][0]} microbatch {late[0][1]} after its backward; it "
            f"must do so before."
        )
    return count


def with_copies_moved(orders: Orders, copies: Copies, delta: FloatArray, rank: int) -> FloatArray:
    """The change of memory at every entry of a rank, from that at every action, (n,)."""
    moved = {"O": 0.0, "D": -1.0, "R": 1.0}
    return np.array(
        [
            delta[entry.at] if entry.at is not None else moved[entry.letter] * copies.offloadable[entry.stage]
            for entry in entries_of(orders, rank)
        ]
    )


class Links(NamedTuple):
    """Nodes of a precedence graph; those of copies follow those of the n actions."""

    previous: IntArray
    feed: IntArray
    latency: FloatArray
    duration: FloatArray


def with_copies_linked(problem: Problem, orders: Orders, links: Links) -> Links:
    """The graph of the actions, with the nodes of their copies."""
    copies = problem.copies
    if orders.copies is None or copies is None:
        return links
    previous, feed, latency, duration = (each.tolist() for each in links)

    def node(before: int, waits_for: int, takes: float) -> int:
        previous.append(before)
        feed.append(waits_for)
        latency.append(0.0)
        duration.append(takes)
        return len(previous) - 1

    for rank in range(orders.pp_degree):
        last = out_engine = in_engine = -1 - rank
        copy: dict[tuple[int, int], int] = {}
        for entry in entries_of(orders, rank):
            if entry.letter == "O":
                copy[entry.cell] = out_engine = node(out_engine, last, copies.offload[entry.stage])
            elif entry.letter == "D":
                last = node(last, copy[entry.cell], 0.0)
            elif entry.letter == "R":
                copy[entry.cell] = in_engine = node(in_engine, last, copies.reload[entry.stage])
            elif entry.at is not None:
                if entry.letter in BACKWARDS and entry.cell in copy:
                    last = node(last, copy[entry.cell], 0.0)
                previous[entry.at] = last
                last = entry.at
    return Links(
        np.array(previous, np.int32),
        np.array(feed, np.int32),
        np.array(latency),
        np.array(duration),
    )
