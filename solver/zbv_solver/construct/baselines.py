"""Classical schedules, to compare every plan with.

They run the same model: their stages are the problem's stages merged in model order (one chunk per rank),
distributed in turn (interleaved), or in a V. B is the full backward, as everywhere. For layers,
:mod:`zbv_solver.search.baselines` gives each schedule the best cut for its own order.

If microbatches differ, the schedules run them in the given order and, with ``-practice`` behind their names,
in the order used in practice: by size, the small ones at both ends. DynaPipe's schedule is made for such
microbatches, and chooses its order itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from zbv_solver.construct import torch_schedules
from zbv_solver.construct.controllable_memory import v_half, v_min
from zbv_solver.construct.cyclic import dynapipe
from zbv_solver.construct.rules import practice_order
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.costs import Costs, Deltas, Memory
from zbv_solver.problem.layered_problem import AUTO_CHUNKS, uncut
from zbv_solver.problem.placement import Placement
from zbv_solver.problem.problem import B, F, I, Problem, W

Rows = NDArray[np.int32]
"""A rank's list, (n, 3): stage, letter code, microbatch."""


def gpipe(rank: int, p: int, m: int) -> Rows:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return _alternate(rank, m, m)


def one_f_one_b(rank: int, p: int, m: int) -> Rows:
    """Warm up with p - 1 - rank forwards, then one forward and one backward (Narayanan et al. 2019)."""
    return _alternate(rank, p - 1 - rank, m)


def eager_1f1b(rank: int, p: int, m: int) -> Rows:
    """1F1B with about twice the warm-up, 2 (p - 1 - rank), which hides transfers (Zhuang et al. 2022)."""
    return _alternate(rank, 2 * (p - 1 - rank), m)


def zb_h1(rank: int, p: int, m: int) -> Rows:
    """1F1B with a split backward and W's delayed by ``rank`` microbatches (Qi et al. 2023, section 2.2).

    After p - rank forwards a step repeats: an I, then a W once ``rank`` others are waiting, then an F while
    any is left. The remaining W's come last.
    """
    return _alternate_split(rank, p - 1 - rank, m)


def interleaved_1f1b(rank: int, p: int, m: int, chunks: int, group: int | None = None) -> Rows:
    """Chunks take turns in rounds of about p microbatches (Narayanan et al. 2021, section 2.2).

    Rounds are as equal as m allows, so m need not be a multiple of p. With ``group``, every round has that
    many microbatches, and the last one has the rest.
    """
    bounds = equal_rounds(p, m) if group is None else np.append(np.arange(0, m, group), m)
    warm_up = (chunks - 1) * int(np.diff(bounds).max()) + 2 * (p - 1 - rank)
    return _in_turns(_alternate(rank, warm_up, chunks * m), bounds, chunks, p)


def interleaved_zb_h1(rank: int, p: int, m: int, chunks: int) -> Rows:
    """ZB-H1 with chunks in turns as in :func:`interleaved_1f1b`: PyTorch's ``InterleavedZeroBubble``."""
    bounds = equal_rounds(p, m)
    warm_up = (chunks - 1) * int(np.diff(bounds).max()) + p - 1 - rank
    return _in_turns(_alternate_split(rank, warm_up, chunks * m), bounds, chunks, p)


def equal_rounds(p: int, m: int) -> NDArray[np.int64]:
    """Bounds of rounds of at least p microbatches that are as equal as possible, and one round if m < p."""
    rounds = max(1, m // p)
    return np.arange(rounds + 1) * m // rounds


def _in_turns(rows: Rows, bounds: NDArray[np.int64], chunks: int, p: int) -> Rows:
    """A rank's list for one stage and all turns, as the list for its chunks; ``bounds`` are the rounds'."""
    # The k-th forward: by round, then by chunk, then by microbatch.
    round_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds) * chunks)
    in_round = np.arange(chunks * int(bounds[-1])) - chunks * bounds[round_of]
    chunk, later = np.divmod(in_round, np.diff(bounds)[round_of])
    microbatch = bounds[round_of] + later
    turn, is_forward = rows[:, 2], rows[:, 1] == F
    rows[:, 0] += (np.where(is_forward, chunk[turn], chunks - 1 - chunk[turn]) * p).astype(np.int32)
    rows[:, 2] = microbatch[turn]
    return rows


def _alternate_split(rank: int, warm_up: int, m: int) -> Rows:
    """As :func:`_alternate` with split backwards: a W follows an I once ``rank`` others are waiting."""
    j, ahead = np.arange(m), warm_up + 1
    rows = np.empty((3 * m, 3), dtype=np.int32)
    # The place of an action is the number of F's, I's and W's before it.
    forward = j + np.maximum(j - ahead + 1, 0) + np.clip(j - ahead - rank + 1, 0, m)
    inputs = np.minimum(ahead + j, m) + j + np.maximum(j - rank, 0)
    weights = np.minimum(ahead + j + rank, m) + np.minimum(j + rank + 1, m) + j
    for letter, places in ((F, forward), (I, inputs), (W, weights)):
        rows[places, 1], rows[places, 2] = letter, j
    rows[:, 0] = rank
    return rows


def _alternate(stage: int, warm_up: int, m: int) -> Rows:
    """``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    k = np.arange(m)
    rows = np.empty((2 * m, 3), dtype=np.int32)
    # The place of an action is the number of F's and B's before it.
    for letter, places in (
        (F, k + np.maximum(k - warm_up, 0)),
        (B, k + np.minimum(warm_up + k + 1, m)),
    ):
        rows[places, 1], rows[places, 2] = letter, k
    rows[:, 0] = stage
    return rows


_SINGLE: dict[str, Callable[[int, int, int], Rows]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_1f1b,
    "zb-h1": zb_h1,
}
_V: dict[str, Callable[[int, int], Sequence[Rows | torch_schedules.Actions]]] = {
    "zb-v": lambda p, m: [torch_schedules.zbv(rank, p, m) for rank in range(p)],
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": lambda p, m: [torch_schedules.dualpipe_v(rank, p, m) for rank in range(p)],
}
"""ZB-V and DualPipeV are those of PyTorch. An F and a B that PyTorch may overlap run one after the other."""
INTERLEAVED = "interleaved-1f1b"
BASELINES = ("gpipe", "1f1b", "eager-1f1b", INTERLEAVED, "zb-h1", *_V)
PRACTICE = "-practice"
DYNAPIPE = "dynapipe"


def baseline_names(problem: Problem) -> tuple[str, ...]:
    """The baselines of a problem: ``BASELINES`` that it has, and more if microbatches differ."""
    names = tuple(name for name in BASELINES if not missing(name, problem))
    if problem.is_equal:
        return names
    return (*names, *(name + PRACTICE for name in names), DYNAPIPE)


def missing(name: str, problem: Problem) -> str:
    """Why a problem has no such baseline; empty if it has."""
    if problem.model is not None and not placements_of(name, problem):
        return "needs more stages than the layers can be cut into"
    if name in _V and problem.placement.chunks != 2 and problem.model is None:
        return f"needs two stages per rank; the problem has {problem.placement.chunks}"
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
    if method != INTERLEAVED:
        found = [Placement.of("v" if method in _V else "single", p)]
    elif problem.model is None:
        found = [Placement.of("loop", p, problem.placement.chunks)]
    else:
        found = [Placement.of("loop", p, chunks) for chunks in AUTO_CHUNKS]
    if problem.model is None:
        return tuple(found)
    layers = uncut(problem)
    return tuple(placement for placement in found if layers.has_room(placement.n_stages))


def order_of(name: str, placement: Placement, m: int) -> Orders:
    """The order of a baseline on its placement, with m microbatches in the given order."""
    method, p = name.removesuffix(PRACTICE), placement.pp_degree
    if method in _V:
        return Orders.of_rows([np.asarray(rows, dtype=np.int32) for rows in _V[method](p, m)])
    if method == INTERLEAVED:
        chunks = placement.chunks
        return Orders.of_rows([interleaved_1f1b(rank, p, m, chunks) for rank in range(p)])
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
    own = merge_stages(problem) if placement.kind == "single" else _on(problem, placement)
    orders = order_of(name, placement, problem.microbatches)
    return own, orders.renamed(practice_order(problem)) if name.endswith(PRACTICE) else orders


def require_baseline(name: str, problem: Problem) -> None:
    """Raise :class:`InvalidInput` for a name that the problem's baselines do not have."""
    names = baseline_names(problem)
    if name not in names:
        reason = missing(name, problem) if name in BASELINES else f"must be one of {', '.join(names)}"
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
            replace(each, costs=merged_costs(each.costs), memory=merged_deltas(each.memory))
            for each in problem.features
        ),
    )


def without_limit(problem: Problem) -> Problem:
    """The same problem with unlimited memory: baselines are shown even if they do not fit."""
    return replace(problem, memory=replace(problem.memory, limit=None))
