"""A problem document in exact integers, and the metrics of its orders.

This module is written only from docs/formats.md and shares no code with the solver. Every float is a multiple
of a power of two, so all durations of a problem are integers in one common unit, and so are all amounts of
memory. Nothing is rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbv_solver.plans.orders import Orders

F, I, W, B, O, D, R = range(7)  # noqa: E741 - the field's letters
LETTERS = "FIWBODR"
COSTS = ("forward", "backward_input", "backward_weight", "backward", "p2p")

Action = tuple[int, int, int]
"""(letter, stage, microbatch)"""
Order = tuple[tuple[Action, ...], ...]
"""The actions of every rank in execution order."""
Pairs = frozenset[Action]
"""The F's that run as a pair with the action after them."""

MEMORY_TOLERANCE = Fraction(999, 10**12)
"""Relative tolerance of a limit, slightly below the solver's (1e-9)."""


@dataclass(frozen=True)
class Pipeline:
    """A problem in exact integers."""

    microbatches: int
    rank_of: tuple[int, ...]
    stages_of: tuple[tuple[int, ...], ...]
    objective: str
    duration: tuple[tuple[tuple[int, ...], ...], ...]
    """[letter][stage][microbatch], as ``delta``; with copies, O and R have the times of the engines."""
    lag: tuple[tuple[int, ...], ...]
    """[boundary][microbatch] latency of a transfer; 0 inside a rank."""
    delta: tuple[tuple[tuple[int, ...], ...], ...]
    static: tuple[int, ...]
    limit: tuple[int, ...] | None
    """Largest memory of a rank, including the tolerance; None means unlimited."""
    time_unit: Fraction
    """Length of one integer step in the problem's unit of time."""
    hidden: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """What pairs can hide, as ``duration``; None if there are no pairs."""
    factor: Fraction = Fraction(1)
    """What the two actions of a pair cost each other."""

    @property
    def has_copies(self) -> bool:
        """Whether an F may be copied to a host, which has room for all of them."""
        return len(self.duration) > B + 1

    @property
    def pp_degree(self) -> int:
        """Number of ranks."""
        return len(self.stages_of)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    def load(self, rank: int) -> int:
        """Least total duration of a rank's actions."""
        d = self.duration
        return sum(
            d[F][s][j] + min(d[B][s][j], d[I][s][j] + d[W][s][j])
            for s in self.stages_of[rank]
            for j in range(self.microbatches)
        )

    @property
    def is_equal(self) -> bool:
        """Whether all microbatches cost the same."""
        tables = (*self.duration, *self.delta, self.lag)
        return all(len(set(row)) == 1 for table in tables for row in table)

    def may_fuse(self, stage: int) -> bool:
        """Whether B can pay for a microbatch: it is cheaper than I and W, or in a pair, or I allocates."""
        d = self.duration
        return self.hidden is not None or any(
            d[B][stage][j] < d[I][stage][j] + d[W][stage][j] or self.delta[I][stage][j] > 0
            for j in range(self.microbatches)
        )

    def is_feasible(self) -> bool:
        """Whether every rank can hold any one microbatch on all its stages."""
        if self.limit is None:
            return True
        needs = (
            self.static[r] + max(sum(self.delta[F][s][j] for s in mine) for j in range(self.microbatches))
            for r, mine in enumerate(self.stages_of)
        )
        return all(need <= limit for need, limit in zip(needs, self.limit, strict=True))

    def together(self, forward: Action, backward: Action) -> int:
        """Duration of a pair; integer, as the step was divided by the factor's denominator."""
        if self.hidden is None:
            raise ValueError("the problem has no pairs.")
        (f, x), (hidden, other) = (
            [table[letter][stage][j] for letter, stage, j in (forward, backward)]
            for table in (self.duration, self.hidden)
        )
        return int(self.factor * max(f, x, f - hidden + x - other, hidden + other))

    def fits(self, rank: int, actions: Sequence[Action]) -> bool:
        """Whether a rank's memory stays within its limit."""
        if self.limit is None:
            return True
        held = self.static[rank]
        for letter, stage, j in actions:
            delta = self.delta[letter][stage][j]
            if held + max(0, delta) > self.limit[rank]:
                return False
            held += delta
        return True

    def value(self, order: Order, pairs: Pairs = frozenset()) -> Fraction | None:
        """The objective in the problem's time unit, or None if the order deadlocks."""
        schedule = Schedule.of(self, order, pairs)
        if schedule is None:
            return None
        return (schedule.makespan() if self.objective == "makespan" else schedule.span()) * self.time_unit


@dataclass(frozen=True)
class Schedule:
    """An order that does not deadlock: its actions in an executable sequence, with their predecessors."""

    pipeline: Pipeline
    order: Order
    sequence: tuple[Action, ...]
    inputs: dict[Action, list[tuple[Action, int]]]
    of_pairs: dict[Action, int]
    """Duration of the pair that an action is in."""

    @classmethod
    def of(cls, pipeline: Pipeline, order: Order, pairs: Pairs = frozenset()) -> Schedule | None:
        """The schedule of an order; None if it deadlocks or the input of an action is missing."""
        there = {action for actions in order for action in actions}
        inputs = {action: list(_inputs(pipeline, there, action)) for action in there}
        for actions in order:
            before: dict[int, Action] = {}  # the last entry of the rank, and of either engine
            for action in actions:
                chain = action[0] if action[0] in (O, R) else F
                inputs[action] += [(before[each], 0) for each in {F, chain} if each in before]
                before[chain] = action
        of_pairs = {}
        for both in (both for actions in order for both in pairwise(actions) if both[0] in pairs):
            needed = [each for half in both for each in inputs[half] if each[0] not in both]
            for half in both:
                inputs[half], of_pairs[half] = needed, pipeline.together(*both)
        done: set[Action] = set()
        sequence: list[Action] = []
        position = [0] * len(order)
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, actions in enumerate(order):
                while position[rank] < len(actions) and all(
                    each in done for each, _ in inputs[actions[position[rank]]]
                ):
                    sequence.append(actions[position[rank]])
                    done.add(actions[position[rank]])
                    position[rank] += 1
                    is_moving = True
        if len(sequence) < len(there):
            return None
        return cls(pipeline, order, tuple(sequence), inputs, of_pairs)

    def length(self, action: Action) -> int:
        """Duration of an action, or of its pair."""
        if action in self.of_pairs:
            return self.of_pairs[action]
        return self.pipeline.duration[action[0]][action[1]][action[2]]

    def starts_after(self, sources: Sequence[Action]) -> dict[Action, int]:
        """Longest path from the start of any source to the start of every reachable action."""
        first = set(sources)
        starts: dict[Action, int] = {}
        for action in self.sequence:
            paths = [
                starts[needed] + self.length(needed) + lag
                for needed, lag in self.inputs[action]
                if needed in starts
            ]
            if action in first:
                paths.append(0)
            if paths:
                starts[action] = max(paths)
        return starts

    def ends_before(self, targets: Sequence[Action]) -> dict[Action, int]:
        """Longest path from the end of every action to the end of a target."""
        tails = dict.fromkeys(targets, 0)
        for action in reversed(self.sequence):
            if action in tails:
                for needed, lag in self.inputs[action]:
                    path = tails[action] + self.length(action) + lag
                    tails[needed] = max(tails.get(needed, 0), path)
        return tails

    def makespan(self) -> Fraction:
        """Time from the first start to the last end if every action starts as early as possible.

        Rank 0 starts first, because every other action depends on stage 0.
        """
        starts = self.starts_after([actions[0] for actions in self.order])
        return Fraction(max(start + self.length(action) for action, start in starts.items()))

    def span(self) -> Fraction:
        """The largest mean weight of a cycle of D, computed as in Karp (1978)."""
        p = len(self.order)
        weight: list[list[int | None]] = []
        for source in self.order:
            starts = self.starts_after([source[0]])
            ends = [actions[-1] for actions in self.order]
            weight.append([starts[end] + self.length(end) if end in starts else None for end in ends])
        walks: list[list[int | None]] = [[0] + [None] * (p - 1)]
        for _ in range(p):
            walks.append([_longest(walks[-1], [row[q] for row in weight]) for q in range(p)])
        means = []
        for q in range(p):
            last = walks[p][q]
            if last is not None:
                known = ((k, walks[k][q]) for k in range(p))
                means.append(min(Fraction(last - walk, p - k) for k, walk in known if walk is not None))
        return max(means)


def _longest(walks: list[int | None], arcs: list[int | None]) -> int | None:
    sums = [walk + arc for walk, arc in zip(walks, arcs, strict=True) if walk is not None and arc is not None]
    return max(sums, default=None)


def _inputs(pipeline: Pipeline, there: set[Action], action: Action) -> Iterator[tuple[Action, int]]:
    letter, stage, j = action
    if letter == F and stage > 0:
        yield (F, stage - 1, j), pipeline.lag[stage - 1][j]
    if letter == O:
        yield (F, stage, j), 0
    if letter in (D, R):
        yield ((O if letter == D else D), stage, j), 0
    if letter in (I, B):
        yield ((R if (R, stage, j) in there else F), stage, j), 0
        if stage + 1 < pipeline.n_stages:
            yield ((I if (I, stage + 1, j) in there else B), stage + 1, j), pipeline.lag[stage][j]
    if letter == W:
        yield (I, stage, j), 0


def rank_of(stage: int, p: int, placement: str) -> int:
    """The rank of a stage."""
    return 2 * p - 1 - stage if placement == "v" and stage >= p else stage % p


def read(document: dict[str, Any]) -> Pipeline:
    """Read a problem document with one value per stage, boundary and rank, as :mod:`.draw` makes them."""
    p, m = document["pp_degree"], document["microbatches"]
    kind = document["placement"]
    chunks = {"v": 2, "single": 1}.get(kind) or document.get("chunks", 2)
    n = p * chunks
    ranks = tuple(rank_of(stage, p, kind) for stage in range(n))
    costs, memory = document["costs"], document.get("memory")
    features = {
        name: list(map(Fraction, values)) for name, values in (document.get("features") or {}).items()
    }

    def table(numbers: Any) -> list[list[Fraction]]:
        """[stage or boundary][microbatch] of a list, or of an object of lists by feature."""
        by_name = numbers if isinstance(numbers, dict) else {"fixed": numbers}
        ones = [Fraction(1)] * m
        return [
            [
                sum((Fraction(c) * features.get(name, ones)[j] for name, c in zip(by_name, row, strict=True)))
                + Fraction(0)
                for j in range(m)
            ]
            for row in zip(*by_name.values(), strict=True)
        ]

    exact = {key: table(costs[key]) for key in COSTS if costs.get(key) is not None}
    fused = exact.get("backward") or [
        [a + b for a, b in zip(*rows, strict=True)]
        for rows in zip(exact["backward_input"], exact["backward_weight"], strict=True)
    ]
    tables = [exact["forward"], exact["backward_input"], exact["backward_weight"], fused]
    lag = [[Fraction(0)] * m if ranks[s] == ranks[s + 1] else exact["p2p"][s] for s in range(n - 1)]
    factor, hidden = Fraction(costs.get("pair_factor", 1)), []
    if shares := costs.get("communication"):
        found = {name: table(shares[name]) for name in COSTS[:2] + COSTS[3:4]}
        hidden = [found["forward"], found["backward_input"], tables[W], found["backward"]]  # W has no pair
    if "offload" in costs:
        tables += [table(costs["offload"]), [[Fraction(0)] * m] * n, table(costs["reload"])]
    unit = lcm(*(value.denominator for each in (*tables, *hidden, lag) for row in each for value in row))
    unit *= factor.denominator
    return Pipeline(
        microbatches=m,
        rank_of=ranks,
        stages_of=tuple(tuple(s for s in range(n) if ranks[s] == rank) for rank in range(p)),
        objective=document["objective"],
        duration=tuple(_in_units(each, unit) for each in tables),
        lag=_in_units(lag, unit),
        **_read_memory(memory, table, n, m, p),
        time_unit=Fraction(1, unit),
        hidden=tuple(_in_units(each, unit) for each in hidden) or None,
        factor=factor,
    )


def _in_units(rows: list[list[Fraction]], unit: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(value * unit) for value in row) for row in rows)


def _read_memory(
    memory: dict[str, Any] | None, table: Callable[[Any], list[list[Fraction]]], n: int, m: int, p: int
) -> dict[str, Any]:
    if memory is None:
        return {"delta": (((0,) * m,) * n,) * 4, "static": (0,) * p, "limit": None}
    forward, inputs = (table(memory[key]) for key in ("forward", "backward_input"))
    static = [Fraction(value) for value in memory["static"]]
    limits = None if memory["limit"] is None else [Fraction(value) for value in memory["limit"]]
    moved = table(memory["offloadable"]) if "offloadable" in memory else []
    amounts = [*(value for row in (*forward, *inputs, *moved) for value in row), *static, *(limits or [])]
    unit = lcm(*(value.denominator for value in amounts))
    taken, grown = _in_units(forward, unit), _in_units(inputs, unit)
    # W releases exactly what F and I left, and B what F allocated.
    left = tuple(tuple(-a - b for a, b in zip(*rows, strict=True)) for rows in zip(taken, grown, strict=True))
    delta = [taken, grown, left, tuple(tuple(-a for a in row) for row in taken)]
    if moved:
        away = _in_units(moved, unit)
        delta += [((0,) * m,) * n, tuple(tuple(-a for a in row) for row in away), away]
    return {
        "delta": tuple(delta),
        "static": tuple(int(value * unit) for value in static),
        "limit": limits and tuple(int(value * unit * (1 + MEMORY_TOLERANCE)) for value in limits),
    }


def order_of(orders: Orders) -> Order:
    """The library's orders as the independent model has them."""
    rows, offset = orders.entries()
    return tuple(
        tuple((letter, stage, j) for stage, letter, j in rows[begin:end].tolist())
        for begin, end in pairwise(offset.tolist())
    )


def pairs_of(orders: Orders) -> Pairs:
    """The same of the library's pairs."""
    mine = ((rank, orders.pairs(rank)) for rank in range(orders.pp_degree))
    return frozenset((F, *orders.actions(rank)[at][::2]) for rank, places in mine for at in places)


def ascending(order: Order) -> Order:
    """The same order with the microbatches of every stage and letter renumbered to ascend.

    I and B count as one letter; the W's of split microbatches keep their order.
    """
    renumbered = []
    for actions in order:
        counts: Counter[tuple[int, int]] = Counter()
        split: dict[int, list[int]] = {}
        mine = []
        for letter, stage, _ in actions:
            if letter == W:
                mine.append((W, stage, split[stage].pop(0)))
                continue
            at = (I if letter == B else letter), stage
            j = counts[at]
            counts[at] += 1
            if letter == I:
                split.setdefault(stage, []).append(j)
            mine.append((letter, stage, j))
        renumbered.append(tuple(mine))
    return tuple(renumbered)


def separated(actions: tuple[tuple[int, int, int], ...], pays: list[bool]) -> Iterator[tuple[int, int, int]]:
    """Replace each B that never pays by I and W."""
    for letter, stage, j in actions:
        if letter == B and not pays[stage]:
            yield I, stage, j
            yield W, stage, j
        else:
            yield letter, stage, j


def text(order: Order) -> str:
    """An order in the notation of plans."""
    return " | ".join(
        " ".join(f"{stage}{LETTERS[letter]}{j}" for letter, stage, j in actions) for actions in order
    )
