"""An independent check of plans, which every plan passes before it leaves the library, command or service.

It deliberately shares no code with timing or search: every rule is a plain loop, the precedence graph is
sorted by Kahn's algorithm, and a stated span is checked against its definition instead of being computed. An
undetected mistake would have to be made twice, in two different ways.

Start times with which every rank fits a window prove that the span is at most this window. A cycle of paths
from rank to rank whose mean length exceeds the window proves that it is more. Both witnesses are computed by
delaying starts.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import numpy as np

from zbv_solver.errors import InvalidPlan
from zbv_solver.kernels.jit import FloatArray, IntArray, can_compile, compiled_where_possible
from zbv_solver.numerals import exact
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Metrics, Plan
from zbv_solver.problem.numeric import MEMORY_TOLERANCE, SAME_METRIC
from zbv_solver.problem.problem import LETTERS, B, F, I, Problem, W
from zbv_solver.verify.copies import Links, check_copies, with_copies_linked, with_copies_moved


class VerifiedOrders(NamedTuple):
    """Orders without a fault: peak memory, the precedence graph, and a sequence in which it can execute."""

    peaks: FloatArray
    """(p,) memory of every rank."""
    previous: IntArray
    """(n,) the preceding action on the same rank; -1 - rank for the first action of a rank."""
    feed: IntArray
    latency: FloatArray
    """(n,) the action of another stage whose output is the input, or -1, and the latency of the transfer."""
    duration: FloatArray
    """(n,) float64."""
    sequence: IntArray
    """(n,) a topological order of the actions."""
    first: IntArray
    last: IntArray
    """(p,) first and last action of every rank."""


def verify_orders(problem: Problem, orders: Orders) -> VerifiedOrders:
    """Check completeness, placement, precedence, deadlock-freedom and memory.

    Raises :class:`InvalidPlan` with the broken rule, and the action and rank that break it.
    """
    where = _check_actions(problem, orders)
    return _precedence_graph(problem, orders, where, _check_memory(problem, orders))


def verify(plan: Plan) -> None:
    """Check the orders (:func:`verify_orders`), and compare stated metrics with recomputed ones.

    Raises :class:`InvalidPlan` with the broken rule, or with the stated and the recomputed value of a metric.
    """
    verify_metrics(plan, verify_orders(plan.problem, plan.orders))


def verify_metrics(plan: Plan, orders: VerifiedOrders) -> None:
    """Compare stated metrics with those of the plan's orders, which are verified already.

    Raises :class:`InvalidPlan` with the stated and the recomputed value of a metric.
    """
    p, metrics = plan.problem.pp_degree, plan.metrics
    _check_finite(metrics)
    start = _earliest(orders, np.zeros(p))
    compare("makespan", metrics.makespan, float(np.max(start + orders.duration) - np.min(start)))
    _check_span(orders, metrics.span, start[orders.first])
    busy = float(np.sum(orders.duration[: orders.last.max() + 1]))  # copies take no time of their rank
    bubble = 1 - busy / (p * metrics.span) if metrics.span > 0 else 0.0
    if abs(bubble - metrics.bubble_rate) > SAME_METRIC:
        raise InvalidPlan(
            f"the stated bubble_rate {exact(metrics.bubble_rate)} is {exact(bubble)} recomputed."
        )
    if len(metrics.peak_memory) != p:
        raise InvalidPlan(f"peak_memory states {len(metrics.peak_memory)} ranks, not {p}.")
    for rank, stated in enumerate(metrics.peak_memory):
        compare(f"peak_memory of rank {rank}", stated, float(orders.peaks[rank]))
    _check_bound(plan)


def _check_finite(metrics: Metrics) -> None:
    """Reject NaN and infinities, because later comparisons could not refute them."""
    for name, stated in vars(metrics).items():
        is_number = name == "status" or (name == "gap" and stated == math.inf) or np.isfinite(stated).all()
        if not is_number:
            raise InvalidPlan(f"the stated {name} is {stated}; it must be a finite number.")


def _check_span(orders: VerifiedOrders, span: float, release: FloatArray) -> None:
    """Refute a span that is too small by a cycle of paths, and one that is too large by start times."""
    mean = _refuting_cycle(orders, span * (1 + SAME_METRIC), release)
    if mean is not None:
        raise InvalidPlan(
            f"the stated span {exact(span)} is too small: paths of {exact(mean)} on average form a cycle "
            f"through the ranks."
        )
    if span > 0 and _refuting_cycle(orders, span * (1 - SAME_METRIC), release) is None:
        raise InvalidPlan(f"the stated span {exact(span)} is too large: the order reaches less.")


def _check_bound(plan: Plan) -> None:
    value, metrics = plan.objective, plan.metrics
    if metrics.lower_bound > value * (1 + SAME_METRIC):
        raise InvalidPlan(
            f"the stated lower_bound {exact(metrics.lower_bound)} is above the objective {exact(value)}, so "
            f"it is no bound."
        )
    gap = value / metrics.lower_bound - 1 if metrics.lower_bound > 0 else math.inf if value > 0 else 0.0
    if gap != metrics.gap and not abs(gap - metrics.gap) <= SAME_METRIC:
        raise InvalidPlan(f"the stated gap {exact(metrics.gap)} is {exact(gap)} recomputed.")
    if metrics.status == "optimal" and gap > SAME_METRIC:
        raise InvalidPlan(f"the stated status is optimal at a gap of {gap:.3g}; optimal means a gap of 0.")


def compare(name: str, stated: float, recomputed: float) -> None:
    """Raise :class:`InvalidPlan` when a stated and a recomputed number differ by more than rounding."""
    if abs(stated - recomputed) > SAME_METRIC * max(abs(stated), abs(recomputed)):
        raise InvalidPlan(f"the stated {name} {exact(stated)} is {exact(recomputed)} recomputed.")


def _check_actions(problem: Problem, orders: Orders) -> IntArray:
    """Range, placement, completeness, and precedence inside a rank.

    Returns
    -------
    where
        (S, m, 4): the index of an action by stage, microbatch and letter, or -1.
    """
    offset, m = orders.offset, problem.microbatches
    if orders.pp_degree != problem.pp_degree:
        raise InvalidPlan(f"found {orders.pp_degree} ranks; the problem has {problem.pp_degree}.")
    if offset[0] != 0 or offset[-1] != len(orders) or np.any(np.diff(offset) < 0):
        raise InvalidPlan("the ranks' lists overlap or miss actions; every action is in exactly one list.")
    where = np.full((problem.n_stages, m, len(LETTERS)), -1, dtype=np.int32)
    rank_of = np.array(problem.placement.rank_of)
    stage, letter, microbatch, rank_of = (
        _for_loops(array) for array in (orders.stage, orders.letter, orders.microbatch, rank_of)
    )
    wrong = int(_locate(stage, letter, microbatch, offset, rank_of, where))
    if wrong >= 0:
        raise InvalidPlan(_fault(problem, orders, wrong))
    forward, inputs, weights, fused = (where[..., letter].ravel() for letter in (F, I, W, B))
    _check_pairs(problem, orders)
    is_whole = fused >= 0
    incomplete = (forward < 0) | (is_whole == (inputs >= 0)) | (is_whole == (weights >= 0))
    if incomplete.any():
        raise InvalidPlan(_incomplete(orders, *divmod(int(np.argmax(incomplete)), m)))
    # A cell's actions are all on one rank, so comparing indices compares places in its list.
    for first, second in ((forward, fused), (forward, inputs), (inputs, weights)):
        for at in second[(second >= 0) & (second < first)].tolist():
            needed = f"{orders.stage[at]}{'I' if orders.letter[at] == W else 'F'}{orders.microbatch[at]}"
            raise InvalidPlan(f"{orders.text_at(at)} comes before {needed} on its rank, but depends on it.")
    check_copies(problem, orders)
    return where


def _check_pairs(problem: Problem, orders: Orders) -> None:
    """A pair is an F and the I or B after it in its list, of another microbatch."""
    if orders.paired is None:
        return
    if problem.communication is None:
        raise InvalidPlan("found a pair of actions; the problem must state costs.communication.")
    last = set((orders.offset[1:] - 1).tolist())
    for at in np.flatnonzero(orders.paired).tolist():
        if orders.letter[at] != F or at in last or orders.letter[at + 1] not in (I, B):
            raise InvalidPlan(
                f"{orders.text_at(at)} begins a pair; a pair is an F and the I or B after it on its rank."
            )
        if orders.microbatch[at] == orders.microbatch[at + 1]:
            raise InvalidPlan(
                f"the pair {orders.text_at(at)}+{orders.text_at(at + 1)} has one microbatch twice, and its "
                f"backward depends on its forward; pair actions of different microbatches."
            )


def _fault(problem: Problem, orders: Orders, at: int) -> str:
    """Describe the fault of an action that is out of range, on a wrong rank, or repeated."""
    m, stage, microbatch = problem.microbatches, int(orders.stage[at]), int(orders.microbatch[at])
    if not (0 <= stage < problem.n_stages and 0 <= microbatch < m and 0 <= orders.letter[at] < len(LETTERS)):
        return (
            f"found {orders.text_at(at)}; stages are 0 to {problem.n_stages - 1} and microbatches 0 to "
            f"{m - 1}."
        )
    rank, home = orders.rank_index()[at], problem.placement.rank_of[stage]
    if rank != home:
        return (
            f"found {orders.text_at(at)} on rank {rank}; placement {problem.placement.kind} puts stage "
            f"{stage} on rank {home}."
        )
    return _incomplete(orders, stage, microbatch)


def _incomplete(orders: Orders, stage: int, microbatch: int) -> str:
    here = orders.letter[(orders.stage == stage) & (orders.microbatch == microbatch)]
    found = ", ".join(f"{np.count_nonzero(here == k)} {LETTERS[k]}" for k in range(4))
    return (
        f"stage {stage} microbatch {microbatch} has {found}; it must have one F, and either one B or "
        f"one I and one W."
    )


def _check_memory(problem: Problem, orders: Orders) -> FloatArray:
    """Peak memory (p,); raises when it exceeds a limit."""
    memory = problem.memory
    forward, inputs = _amounts(problem, "memory", "forward"), _amounts(problem, "memory", "backward_input")
    # W releases what F and I leave. The stated deltas sum to 0 only up to rounding, and the rounding would
    # accumulate over many microbatches.
    left = np.maximum(forward + inputs, 0.0)
    tables = {F: forward, I: np.where(left > 0, inputs, -forward), W: -left, B: -forward}
    delta, peaks = _by_action(orders, tables), np.array(memory.static, dtype=np.float64)
    for rank, static in enumerate(memory.static):
        # While an action runs, its rank holds the larger of the amounts before and after it. So it suffices
        # to look after every action.
        own = delta[orders.slice_of(rank)]
        if problem.copies is not None:
            own = with_copies_moved(orders, problem.copies, delta, rank)
        peaks[rank] = np.cumsum(np.append(static, own)).max()
    for rank, limit in enumerate(memory.limit or ()):
        if peaks[rank] > limit + MEMORY_TOLERANCE * max(abs(peaks[rank]), abs(limit)):
            raise InvalidPlan(
                f"rank {rank} needs {exact(peaks[rank])} of memory; its limit is {exact(limit)}."
            )
    return peaks


def _precedence_graph(problem: Problem, orders: Orders, where: IntArray, peaks: FloatArray) -> VerifiedOrders:
    """The record of complete orders; raises :class:`InvalidPlan` when a cycle makes them a deadlock."""
    duration, at_boundary = _durations_of(problem, orders), _amounts(problem, "costs", "p2p")
    rank_of = np.array(problem.placement.rank_of)
    at_boundary[rank_of[1:] == rank_of[:-1]] = 0.0
    # The action whose output is the input of every action, or -1. A complete cell has either I or B; the
    # index of the other is -1.
    feed, latency = np.full(len(orders), -1, np.int32), np.zeros(len(orders))
    for at, source in (
        (np.flatnonzero((orders.letter == F) & (orders.stage > 0)), -1),
        (np.flatnonzero((orders.letter != F) & (orders.letter != W) & (orders.stage < len(where) - 1)), 1),
    ):
        stage, microbatch = orders.stage[at], orders.microbatch[at]
        made = where[stage + source, microbatch]
        feed[at] = made[:, F] if source < 0 else np.maximum(made[:, I], made[:, B])
        if orders.paired is not None:  # the results of both actions are there when the second one ends
            feed[at] += orders.paired[feed[at]]
        latency[at] = at_boundary[np.minimum(stage, stage + source), microbatch]
    previous = np.arange(-1, len(orders) - 1, dtype=np.int32)
    filled = np.flatnonzero(np.diff(orders.offset))
    previous[orders.offset[filled]] = -1 - filled
    previous, feed, latency, duration = with_copies_linked(
        problem, orders, Links(previous, feed, latency, duration)
    )
    sequence, done = _kahn(_for_loops(previous), _for_loops(feed))
    if done < len(previous):
        stuck = np.setdiff1d(np.arange(len(orders)), sequence[:done])
        raise InvalidPlan(
            f"the order deadlocks: {len(stuck)} actions wait in a cycle, among them "
            f"{orders.text_at(stuck[0])}."
        )
    first, last = orders.offset[:-1], orders.offset[1:] - 1
    return VerifiedOrders(peaks, previous, feed, latency, duration, sequence, first, last)


def _for_loops(array: IntArray) -> IntArray:
    """The array, or a list if kernels run as plain Python, which reads lists in half the time."""
    return array if can_compile() else cast(IntArray, array.tolist())


_TABLES = {"costs": "duration", "memory": "delta", "communication": "communication"}
_LETTER_OF = {"forward": F, "backward_input": I, "backward_weight": W, "backward": B}


def _amounts(problem: Problem, section: str, name: str) -> FloatArray:
    """What microbatches cost on a stage or boundary, (length, m), straight from the problem's document."""
    given = problem.given_arrays
    if given is not None:  # of a search: these stand for the numbers of the document
        table: FloatArray = getattr(given, _TABLES[section])
        by_kind: FloatArray = given.latency if name == "p2p" else table[_LETTER_OF[name]]
        return by_kind[:, given.kind_of]
    fixed = getattr(getattr(problem, section), name)
    table = np.repeat(np.array(fixed, dtype=np.float64)[:, None], problem.microbatches, axis=1)
    for feature in problem.features:
        table += np.outer(getattr(getattr(feature, section), name), feature.value)
    return table


def _durations_of(problem: Problem, orders: Orders) -> FloatArray:
    """The duration of every action, (n,)."""
    forward, inputs, weights = (
        _amounts(problem, "costs", name) for name in ("forward", "backward_input", "backward_weight")
    )
    fused = inputs + weights if problem.costs.backward is None else _amounts(problem, "costs", "backward")
    # A sum of terms with different signs may be 0 up to rounding.
    found = np.maximum(_by_action(orders, {F: forward, I: inputs, W: weights, B: fused}), 0.0)
    if orders.paired is not None:
        hidden = {
            letter: _amounts(problem, "communication", name)
            for name, letter in _LETTER_OF.items()
            if letter != W
        }
        communication = np.maximum(_by_action(orders, hidden), 0.0)
        for at in np.flatnonzero(orders.paired).tolist():
            alone = found[at : at + 2]
            other = communication[at : at + 2]
            together = max(*alone, (alone - other).sum(), other.sum())
            # The F takes no time, and the action after it that of both.
            found[at], found[at + 1] = 0.0, problem.pair_factor * together
    return found


def _by_action(orders: Orders, tables: dict[int, FloatArray]) -> FloatArray:
    """The number of every action, (n,), from a table (S, m) per letter."""
    found = np.zeros(len(orders))
    for letter, table in tables.items():
        chosen = orders.letter == letter
        found[chosen] = table[orders.stage[chosen], orders.microbatch[chosen]]
    return found


def _refuting_cycle(orders: VerifiedOrders, window: float, release: FloatArray) -> float | None:
    """Decide whether start times exist that keep every rank within a window, with a witness in both cases.

    First starts (``release``, in place) are delayed until every rank fits the window. Every delay follows a
    critical path, which links the rank to the one where the path begins. If such links form a cycle, its
    paths are longer on average than the window, and no start times exist. Returns their mean length, or None
    when start times were found.
    """
    pushed_by: dict[int, tuple[int, float]] = {}
    # Without a cycle, no chain of delays visits a rank twice. The extra rounds are for rounding.
    for _ in range(2 * len(release) + 8):
        start = _earliest(orders, release)
        needed = start[orders.last] + orders.duration[orders.last] - window
        late = np.flatnonzero(needed > release + 1e-12 * abs(window))
        if not len(late):
            return None
        # For a rank that must start later: the rank where its critical path begins, and the path's length.
        for rank in late.tolist():
            pushed_by[rank] = _trace(orders, start, release, orders.last[rank])
        mean = _longest_cycle(pushed_by)
        if mean > window:
            return mean
        release[late] = needed[late]
    raise InvalidPlan("the span cannot be checked: neither start times nor a cycle of paths decides it.")


def _longest_cycle(pushed_by: dict[int, tuple[int, float]]) -> float:
    """Largest mean length of a cycle of delays, or -inf."""
    best = -math.inf
    for begin in pushed_by:
        total, count, rank = 0.0, 0, begin
        while rank in pushed_by and count <= len(pushed_by):
            rank, length = pushed_by[rank]
            total += length
            count += 1
            if rank == begin:
                best = max(best, total / count)
                break
    return best


@compiled_where_possible
def _locate(
    stage: IntArray,
    letter: IntArray,
    microbatch: IntArray,
    offset: IntArray,
    rank_of: IntArray,
    where: IntArray,
) -> int:  # pragma: no cover - compiled
    """Fill ``where``; returns the first action that is out of range, on a wrong rank, or repeated, or -1."""
    for rank in range(len(offset) - 1):
        for at in range(offset[rank], offset[rank + 1]):
            s, k, j = stage[at], letter[at], microbatch[at]
            if not (0 <= s < len(rank_of) and 0 <= j < where.shape[1] and 0 <= k < 4) or rank_of[s] != rank:
                return at
            if where[s, j, k] >= 0:
                return at
            where[s, j, k] = at
    return -1


@compiled_where_possible
def _kahn(previous: IntArray, feed: IntArray) -> tuple[IntArray, int]:  # pragma: no cover - compiled
    """A topological order of the actions, and how many of them can be executed."""
    n = len(previous)
    after = np.full(n, -1, np.int32)  # in its chain
    for at in range(n):
        if previous[at] >= 0:
            after[previous[at]] = at
    # The newest consumer of every output, and for every consumer the one before it: a pair has two outputs.
    takes, also, waiting = np.full(n, -1, np.int32), np.full(n, -1, np.int32), np.zeros(n, np.int8)
    queue, size, done = np.empty(n, np.int32), 0, 0
    for at in range(n):
        if feed[at] >= 0:
            also[at] = takes[feed[at]]
            takes[feed[at]] = at
            waiting[at] += 1
        if previous[at] >= 0:
            waiting[at] += 1
        if waiting[at] == 0:
            queue[size] = at
            size += 1
    while done < size:
        at = queue[done]
        done += 1
        follower = takes[at]
        while follower >= 0:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
            follower = also[follower]
        follower = after[at]
        if follower >= 0:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                queue[size] = follower
                size += 1
    return queue, done


@compiled_where_possible
def _earliest(orders: VerifiedOrders, release: FloatArray) -> FloatArray:  # pragma: no cover - compiled
    """Earliest starts (n,) when rank r may not start before ``release[r]``."""
    duration, start = orders.duration, np.empty(len(orders.sequence))
    # F before I or B, and I before W, needs no term here: a cell's actions are on one rank, and the verifier
    # has checked their order in its list.
    for at in orders.sequence:
        before, remote = orders.previous[at], orders.feed[at]
        begin = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0:
            begin = max(begin, start[remote] + duration[remote] + orders.latency[at])
        start[at] = begin
    return start


@compiled_where_possible
def _trace(
    orders: VerifiedOrders, start: FloatArray, release: FloatArray, at: int
) -> tuple[int, float]:  # pragma: no cover - compiled
    """Trace the critical path back from an action: the rank where it begins, and its length."""
    duration, latency, length = orders.duration, orders.latency, 0.0
    while True:
        length += duration[at]
        before, remote = orders.previous[at], orders.feed[at]
        # These are the sums of `earliest`, in the same order of additions. So the comparison below finds the
        # input that determined the start.
        free = start[before] + duration[before] if before >= 0 else release[-1 - before]
        if remote >= 0 and start[remote] + duration[remote] + latency[at] > free:
            length += latency[at]
            at = remote
        elif before >= 0:
            at = before
        else:
            return -1 - before, length
