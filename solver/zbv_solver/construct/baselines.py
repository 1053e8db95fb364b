"""Classical schedules, to stand beside every plan.

They run the same model: their stages are the V stages merged in model order (one chunk per rank), or the
V stages dealt round (interleaved). Letters as everywhere: B is the full backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from zbv_solver.errors import InvalidInput
from zbv_solver.orders import Orders
from zbv_solver.placement import Placement
from zbv_solver.problem import B, Costs, F, I, Memory, Problem, W

Row = tuple[int, int, int]
"""(stage, letter code, microbatch)"""


def gpipe(rank: int, p: int, m: int) -> list[Row]:
    """All forwards, then all backwards (Huang et al. 2019)."""
    return [(rank, F, j) for j in range(m)] + [(rank, B, j) for j in range(m)]


def one_f_one_b(rank: int, p: int, m: int) -> list[Row]:
    """Warm up with p - 1 - rank forwards, then one forward and one backward (Narayanan et al. 2019)."""
    return list(_alternate(rank, min(m, p - 1 - rank), m))


def eager_1f1b(rank: int, p: int, m: int) -> list[Row]:
    """1F1B with about twice the warm-up, 2 (p - 1 - rank), which hides transfers (Zhuang et al. 2022)."""
    return list(_alternate(rank, min(m, 2 * (p - 1 - rank)), m))


def zb_h1(rank: int, p: int, m: int) -> list[Row]:
    """1F1B with the backward split, W's kept back by ``rank`` microbatches (Qi et al. 2023, section 2.2)."""
    rows: list[Row] = [(rank, F, j) for j in range(min(m, p - rank))]
    for j in range(m):
        rows.append((rank, I, j))
        if j >= rank:
            rows.append((rank, W, j - rank))
        if j + p - rank < m:
            rows.append((rank, F, j + p - rank))
    return rows + [(rank, W, j) for j in range(max(0, m - rank), m)]


def interleaved_1f1b(rank: int, p: int, m: int, chunks: int) -> list[Row]:
    """Chunks take turns by rounds of about p microbatches (Narayanan et al. 2021, section 2.2).

    Rounds are as even as m allows, so m need not be a multiple of p.
    """
    rounds = max(1, m // p)
    bounds = [m * k // rounds for k in range(rounds + 1)]
    pairs = list(pairwise(bounds))
    forward = [(c * p + rank, j) for lo, hi in pairs for c in range(chunks) for j in range(lo, hi)]
    backward = [(c * p + rank, j) for lo, hi in pairs for c in reversed(range(chunks)) for j in range(lo, hi)]
    longest = max(hi - lo for lo, hi in pairs)
    warm_up = min(len(forward), (chunks - 1) * longest + 2 * (p - 1 - rank))
    rows: list[Row] = [(s, F, j) for s, j in forward[:warm_up]]
    for ahead, (stage, j) in enumerate(backward):
        if warm_up + ahead < len(forward):
            later, k = forward[warm_up + ahead]
            rows.append((later, F, k))
        rows.append((stage, B, j))
    return rows


def _alternate(rank: int, warm_up: int, m: int) -> Iterator[Row]:
    yield from ((rank, F, j) for j in range(warm_up))
    for j in range(m):
        if warm_up + j < m:
            yield rank, F, warm_up + j
        yield rank, B, j


_SINGLE: dict[str, Callable[[int, int, int], list[Row]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_1f1b,
    "zb-h1": zb_h1,
}
BASELINES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1")


def baseline(name: str, problem: Problem) -> tuple[Problem, Orders]:
    """A baseline's own problem (same model, other placement) and its order.

    Parameters
    ----------
    name
        One of ``BASELINES``.
    problem
        A problem with two stages per rank.

    Raises
    ------
    InvalidInput
        For an unknown name.
    """
    p, m = problem.pp_degree, problem.microbatches
    if name == "interleaved-1f1b":
        looped = replace(problem, placement=Placement.of("loop", p, problem.placement.chunks))
        return looped, Orders.pack(
            [interleaved_1f1b(rank, p, m, looped.placement.chunks) for rank in range(p)]
        )
    if name not in _SINGLE:
        raise InvalidInput.at("", f"found baseline {name!r}; must be one of {', '.join(BASELINES)}.")
    merged = merge_stages(problem)
    return merged, Orders.pack([_SINGLE[name](rank, p, m) for rank in range(p)])


def merge_stages(problem: Problem) -> Problem:
    """The same model with one stage per rank: neighbouring stages merged in model order.

    Costs and deltas add up; of the transfers those between the merged stages remain.
    """
    costs, memory, chunks = problem.costs, problem.memory, problem.placement.chunks

    def merged(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[k : k + chunks]) for k in range(0, len(values), chunks))

    return replace(
        problem,
        placement=Placement.of("single", problem.pp_degree),
        costs=Costs(
            forward=merged(costs.forward),
            backward_input=merged(costs.backward_input),
            backward_weight=merged(costs.backward_weight),
            p2p=costs.p2p[chunks - 1 :: chunks],
            backward=None if costs.backward is None else merged(costs.backward),
        ),
        memory=Memory(
            forward=merged(memory.forward),
            backward_input=merged(memory.backward_input),
            backward_weight=merged(memory.backward_weight),
            static=memory.static,
            limit=memory.limit,
        ),
    )


def without_limit(problem: Problem) -> Problem:
    """The same problem with unlimited memory: baselines are shown even where they do not fit."""
    return replace(problem, memory=replace(problem.memory, limit=None))
