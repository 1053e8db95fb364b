"""Classical schedules, to compare every plan with.

They run the same model: their stages are the problem's stages merged in model order (one chunk per rank),
distributed in turn (interleaved), or in a V. B is the full backward, as everywhere. For layers,
:mod:`zbv_solver.search.assemble` gives each schedule the best cut for its own order.

If microbatches differ, the schedules run them in the given order and, with ``-practice`` behind their names,
in the order used in practice: by size, the small ones at both ends. DynaPipe's schedule is made for such
microbatches, and chooses its order itself (Jiang et al., EuroSys 2024; written from the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np

from zbv_solver.construct.classical import (
    Actions,
    Rows,
    dualpipe_v,
    eager_1f1b,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    one_f_one_b,
    overlapped_1f1b,
    v_half,
    v_min,
    zb_h1,
    zbv,
)
from zbv_solver.construct.rules import practice_order
from zbv_solver.construct.tables import sizes
from zbv_solver.errors import InvalidInput
from zbv_solver.kernels.jit import FloatArray, IntArray
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.layered_problem import AUTO_CHUNKS, uncut
from zbv_solver.problem.numeric import SEARCH_MEMORY
from zbv_solver.problem.problem import B, F, Problem
from zbv_solver.problem.stages import Communication, Costs, Deltas, Memory, Placement
from zbv_solver.timing.start_times import objective_of

_SINGLE: dict[str, Callable[[int, int, int], Rows]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b-overlap": overlapped_1f1b,
    "eager-1f1b": eager_1f1b,
    "zb-h1": zb_h1,
}
_V: dict[str, Callable[[int, int], Sequence[Rows | Actions]]] = {
    "zb-v": lambda p, m: [zbv(rank, p, m) for rank in range(p)],
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": lambda p, m: [dualpipe_v(rank, p, m) for rank in range(p)],
}
"""ZB-V and DualPipeV are those of PyTorch. An F and a B that PyTorch may overlap run one after the other."""
INTERLEAVED = "interleaved-1f1b"
BASELINES = ("gpipe", "1f1b", "eager-1f1b", INTERLEAVED, "zb-h1", *_V)
INTERLEAVED_OVERLAP = "interleaved-1f1b-overlap"
OVERLAPPED = ("1f1b-overlap", INTERLEAVED_OVERLAP)
"""Those of Megatron-Core for problems with pairs."""
GROUPED = "pipeoffload-selective"
OFFLOADED = {"pipeoffload-half": 0.5, "pipeoffload-full": 1.0, GROUPED: 0.5}
"""Interleaved 1F1B with copies to the host: the share of a rank's stages that is copied. Those of the first
chunks come first, because microbatches are away from them the longest (PipeOffload, Wan et al. 2025, arXiv
2503.01328, section 3). The last one has smaller groups of microbatches."""
PRACTICE = "-practice"
DYNAPIPE = "dynapipe"
MANY = 20
"""DynaPipe forms three clusters of more microbatches, otherwise four."""
_ROUNDS = 32


def baseline_names(problem: Problem) -> tuple[str, ...]:
    """The baselines of a problem: ``BASELINES`` that it has, and more with pairs or unequal microbatches."""
    known = BASELINES if problem.communication is None else (*BASELINES, *OVERLAPPED)
    names = tuple(name for name in (*known, *OFFLOADED) if not missing(name, problem))
    if problem.is_equal:
        return names
    return (*names, *(name + PRACTICE for name in names), DYNAPIPE)


def missing(name: str, problem: Problem) -> str:
    """Why a problem has no such baseline; empty if it has."""
    if problem.model is not None and not placements_of(name, problem):
        return "needs more stages than the layers can be cut into"
    if name in _V and problem.placement.chunks != 2 and problem.model is None:
        return f"needs two stages per rank; the problem has {problem.placement.chunks}"
    if name in OFFLOADED and (problem.copies is None or problem.copies.host_limit is not None):
        return "needs copies to the host (costs.offload), and a host without a limit"
    if problem.placement.chunks * OFFLOADED.get(name, 1) < 1:
        return "needs two stages per rank; the problem has one"
    if name == "dualpipe-v" and problem.microbatches < 2 * problem.pp_degree:
        return (
            f"needs a microbatch per stage, {2 * problem.pp_degree}; the problem has {problem.microbatches}"
        )
    return ""


def placements_of(name: str, problem: Problem) -> tuple[Placement, ...]:
    """The placements of a baseline to choose from.

    Interleaved 1F1B has as many stages per rank as the problem. Layers can also be cut into others, so there
    it may have 2, 3 or 4.
    """
    method, p = name.removesuffix(PRACTICE), problem.pp_degree
    if method not in (INTERLEAVED, INTERLEAVED_OVERLAP, *OFFLOADED):
        placements = [Placement.of("v" if method in _V else "single", p)]
    elif problem.model is None:
        placements = [Placement.of("loop", p, problem.placement.chunks)]
    else:
        placements = [Placement.of("loop", p, chunks) for chunks in AUTO_CHUNKS]
    if problem.model is None:
        return tuple(placements)
    layers = uncut(problem)
    return tuple(placement for placement in placements if layers.has_room(placement.n_stages))


def order_of(name: str, placement: Placement, m: int) -> Orders:
    """The order of a baseline on its placement, with m microbatches in the given order."""
    method, p = name.removesuffix(PRACTICE), placement.pp_degree
    if method in _V:
        return Orders.of_rows([np.asarray(rows, dtype=np.int32) for rows in _V[method](p, m)])
    if method == GROUPED:
        return Orders.of_rows([grouped_interleaved(rank, p, m, placement.chunks) for rank in range(p)])
    if method in (INTERLEAVED, INTERLEAVED_OVERLAP, *OFFLOADED):
        chunks, more = placement.chunks, int(method == INTERLEAVED_OVERLAP)
        return Orders.of_rows([interleaved_1f1b(rank, p, m, chunks, more=more) for rank in range(p)])
    return Orders.of_rows([_SINGLE[method](rank, p, m) for rank in range(p)])


def baseline(name: str, problem: Problem) -> tuple[Problem, Orders]:
    """The problem of a baseline (the same stages, on another placement) and its order.

    Parameters
    ----------
    name
        One of :func:`baseline_names`.
    problem
        The problem to compare on.

    Raises
    ------
    InvalidInput
        For a name that the problem's baselines do not have.
    """
    require_baseline(name, problem)
    if name == DYNAPIPE:
        merged = merge_stages(problem)
        return merged, dynapipe(merged)
    (placement, *_) = placements_of(name, replace(problem, model=None))
    placed = merge_stages(problem) if placement.kind == "single" else _on(problem, placement)
    orders = order_of(name, placement, problem.microbatches)
    return placed, orders.renamed(practice_order(problem)) if name.endswith(PRACTICE) else orders


def require_baseline(name: str, problem: Problem) -> None:
    """Raise :class:`InvalidInput` for a name that the problem's baselines do not have."""
    names = baseline_names(problem)
    if name not in names:
        reason = missing(name, problem) or f"must be one of {', '.join(names)}"
        raise InvalidInput.at("", f"found baseline {name!r}; {reason}.")


def _on(problem: Problem, placement: Placement) -> Problem:
    """The same stages on another placement; the static memory of layers moves with them."""
    if problem.model is None:
        return replace(problem, placement=placement)
    static = problem.model.static_of(placement.stages_of)
    return replace(problem, placement=placement, memory=replace(problem.memory, static=static))


def merge_stages(problem: Problem) -> Problem:
    """The same model with one stage per rank: neighbouring stages merged in model order.

    Costs and deltas are summed; transfers remain only between merged stages.
    """
    memory, chunks = problem.memory, problem.placement.chunks

    def merged(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[k : k + chunks]) for k in range(0, len(values), chunks))

    def merged_costs(costs: Costs) -> Costs:
        return costs.mapped(merged, costs.p2p[chunks - 1 :: chunks])

    def merged_deltas(deltas: Deltas) -> Deltas:
        return Deltas(merged(deltas.forward), merged(deltas.backward_input), merged(deltas.backward_weight))

    def merged_communication(hidden: Communication | None) -> Communication | None:
        return None if hidden is None else Communication(*map(merged, vars(hidden).values()))

    static, model = memory.static, problem.model
    if model is not None:
        groups = [range(k, k + chunks) for k in range(0, problem.n_stages, chunks)]
        static, model = model.static_of(groups), model.merged(chunks)
    return replace(
        problem,
        placement=Placement.of("single", problem.pp_degree),
        model=model,
        costs=merged_costs(problem.costs),
        memory=Memory(**vars(merged_deltas(memory)), static=static, limit=memory.limit),
        features=tuple(
            replace(
                feature,
                costs=merged_costs(feature.costs),
                memory=merged_deltas(feature.memory),
                communication=merged_communication(feature.communication),
            )
            for feature in problem.features
        ),
        communication=merged_communication(problem.communication),
        copies=None,  # no classical schedule has any
    )


def without_limit(problem: Problem) -> Problem:
    """The same problem with unlimited memory: baselines are shown even if they do not fit."""
    return replace(problem, memory=replace(problem.memory, limit=None))


def dynapipe(problem: Problem) -> Orders:
    """The shortest memory-aware cyclic schedule over orders of clusters; one stage per rank.

    Microbatches of similar time form three or four clusters. Every order of the clusters is tried, and the
    given order. The schedule keeps the memory limit unless a single microbatch exceeds it.
    """
    size = sizes(problem)
    clusters = clustered(size, 3 if len(size) > MANY else 4)
    entries = [np.concatenate(order) for order in permutations(clusters)]
    made = [cyclic(problem, entry) for entry in (np.arange(len(size)), *entries)]
    return min(made, key=partial(objective_of, problem))


def cyclic(problem: Problem, entry: IntArray) -> Orders:
    """The memory-aware cyclic schedule of microbatches that enter in the order ``entry``, (m,).

    In a cycle each rank runs at most one backward and then at most one forward, in the order of entry; what a
    rank finishes, its neighbour may run from the next cycle on. A forward waits while the rank's memory has
    no room for it. The cycles only determine the order of the actions: nothing waits for the end of a cycle
    when the order is run (section 5 of the paper).
    """
    arrays, p, m = problem.arrays, problem.pp_degree, len(entry)
    room = arrays.limit * (1 + SEARCH_MEMORY) - arrays.static
    held = np.cumsum(np.pad(arrays.delta[F][:, arrays.kind_of[entry]], ((0, 0), (1, 0))), axis=1)
    rank = np.arange(p)
    # The cycles of the F's and B's of every rank, one column per microbatch in the order of entry.
    forward, backward = np.zeros((p, m + 1), np.int64), np.zeros((p, m + 1), np.int64)
    gone = np.zeros(p, np.int64)  # backwards that a rank waits for, so that the next forward has room
    for k in range(m):
        while (short := (gone < k) & (held[rank, k + 1] - held[rank, gone] > room)).any():
            gone += short
        # The last column is still 0; it stands for the microbatch before the first one. A backward comes
        # first in its cycle, so a forward may use its memory in the same one.
        earliest = np.maximum(forward[:, k - 1] + 1, backward[rank, gone - 1])
        forward[:, k] = np.maximum.accumulate(earliest - rank) + rank
        earliest = np.maximum(backward[:, k - 1] + 1, forward[:, k] + 1)[::-1]
        backward[:, k] = (np.maximum.accumulate(earliest - rank) + rank)[::-1]
    return _orders(forward[:, :m], backward[:, :m], entry)


def clustered(size: FloatArray, count: int) -> list[IntArray]:
    """Indices of similar sizes together: at most ``count`` clusters, the smallest sizes first.

    The means of Lloyd's algorithm, which start at evenly spread quantiles. Within a cluster the given order
    remains.
    """
    means = np.unique(np.quantile(size, (np.arange(count) + 0.5) / count))
    for _ in range(_ROUNDS):
        nearest = np.abs(size[:, None] - means).argmin(axis=1)
        moved = np.array([size[nearest == one].mean() for one in np.unique(nearest)])
        if np.array_equal(moved, means):
            break
        means = moved
    nearest = np.abs(size[:, None] - means).argmin(axis=1)
    return [np.flatnonzero(nearest == one) for one in np.unique(nearest)]


def _orders(forward: IntArray, backward: IntArray, entry: IntArray) -> Orders:
    """The actions of every rank by cycle, the backward of a cycle first."""
    ranks = []
    for rank, (forwards, backwards) in enumerate(zip(forward, backward, strict=True)):
        rows = np.empty((2 * len(entry), 3), np.int32)
        rows[:, 0] = rank
        rows[:, 1] = np.repeat((F, B), len(entry))
        rows[:, 2] = np.tile(entry, 2)
        ranks.append(rows[np.argsort(np.concatenate([2 * forwards + 1, 2 * backwards]))])
    return Orders.of_rows(ranks)
