"""Problems for tests: plain ones by name, random ones as hypothesis strategies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st
from zbv_solver.problem.problem import Objective, Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.problem.stages import (
    Communication,
    Copies,
    Costs,
    Deltas,
    Feature,
    Memory,
    Placement,
    PlacementKind,
)


def uniform(
    p: int, m: int, *, limit: float | None = None, p2p: float = 0, objective: Objective = "span", **parts: Any
) -> Problem:
    """F = I = W = 1; a forward holds 1, half of which I gives back. 1F1B's peak is 2p.

    ``parts`` of the document may be others, such as ``costs`` or ``placement``.
    """
    return parse_problem(uniform_document(p, m, limit=limit, p2p=p2p, objective=objective) | parts)


def uniform_document(p: int, m: int, *, limit: float | None = None, **changes: Any) -> dict[str, Any]:
    """The document of :func:`uniform`."""
    return {
        "pp_degree": p,
        "microbatches": m,
        "objective": changes.get("objective", "span"),
        "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1, "p2p": changes.get("p2p", 0)},
        "memory": {"forward": 1, "backward_input": -0.5, "backward_weight": -0.5, "limit": limit},
    }


DIFFERING: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 3,
    "features": {"tokens": [4, 2, 1], "tokens_squared": [16, 4, 1], "unused": [1, 2, 3]},
    "costs": {
        "forward": {"fixed": 20, "tokens": -1, "tokens_squared": 0.5},
        "backward_input": {"tokens": [3, 4]},
        "backward_weight": 7,
        "p2p": {"fixed": 5, "tokens": 1},
    },
    "memory": {
        "forward": {"tokens": 2},
        "backward_input": {"tokens": -1},
        "backward_weight": {"tokens": -1},
        "static": [1, 1, 1, 2],
        "limit": [9, 17, 17, 17.5],
    },
}
"""The document of a problem whose microbatches differ."""

UNITS = (1.0, 1.0, 1.0, 0.1, 1 / 3, 1e-6, 123_456.7)
"""Of the costs of random problems. Numbers that are not binary fractions round in every sum."""


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_p: int = 4,
    max_m: int = 6,
    kinds: tuple[PlacementKind, ...] = ("v",),
    loop_chunks: tuple[int, ...] = (2, 2, 3),
    fused: bool = True,
    objective: Objective | None = None,
) -> Problem:
    """Random costs and memory changes per stage, without a memory limit.

    Costs are small multiples of a unit over many decades, so that many of them are equal. Some I's grow the
    memory, and some B's are cheaper than I and W.
    """
    p, m = draw(st.integers(1, max_p)), draw(st.integers(1, max_m))
    kind = draw(st.sampled_from(kinds))
    chunks = draw(st.sampled_from(loop_chunks)) if kind == "loop" else None
    placement = Placement.of(kind, p, chunks)
    n = placement.n_stages
    cost, unit = st.integers(0, 20), draw(st.sampled_from(UNITS))

    def per_stage() -> tuple[float, ...]:
        return tuple(unit * amount for amount in draw(st.lists(cost, min_size=n, max_size=n)))

    forward, inputs, weights = per_stage(), per_stage(), per_stage()
    backward = None
    if fused and draw(st.booleans()):
        shares = draw(st.lists(st.integers(5, 12), min_size=n, max_size=n))
        backward = tuple((i + w) * share / 10 for i, w, share in zip(inputs, weights, shares, strict=True))
    held = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    released = [draw(st.integers(0, amount + 3)) for amount in held]
    memory = Memory(
        forward=tuple(map(float, held)),
        backward_input=tuple(float(w - f) for f, w in zip(held, released, strict=True)),
        backward_weight=tuple(-float(w) for w in released),
        static=tuple(map(float, draw(st.lists(st.integers(0, 5), min_size=p, max_size=p)))),
    )
    lags = tuple(unit * lag for lag in draw(st.lists(st.integers(0, 6), min_size=n - 1, max_size=n - 1)))
    return Problem(
        placement=placement,
        microbatches=m,
        costs=Costs(forward, inputs, weights, lags, backward),
        memory=memory,
        objective=objective or draw(st.sampled_from(["span", "makespan"])),  # type: ignore[arg-type]
    )


def limited(problem: Problem, headroom: float | tuple[float, ...]) -> Problem:
    """The problem with a limit of its smallest feasible one plus ``headroom`` (scalar or per rank)."""
    extra = headroom if isinstance(headroom, tuple) else (headroom,) * problem.pp_degree
    limit = tuple(s + e for s, e in zip(problem.smallest_limit, extra, strict=True))
    return replace(problem, memory=replace(problem.memory, limit=limit))


@st.composite
def limited_problems(draw: st.DrawFn, /, **options: Any) -> Problem:
    """Random problems with a feasible limit, often the smallest."""
    problem = draw(problems(**options))
    p = problem.pp_degree
    headroom = draw(st.lists(st.sampled_from([0, 0, 1, 3, 10, 40]), min_size=p, max_size=p))
    return limited(problem, tuple(map(float, headroom)))


def with_sizes(problem: Problem, size: list[float]) -> Problem:
    """Microbatch j costs and holds 1 + size[j] times what it did; latencies stay."""
    costs, memory = problem.costs, problem.memory
    deltas = Deltas(memory.forward, memory.backward_input, memory.backward_weight)
    feature = Feature("size", tuple(size), replace(costs, p2p=(0.0,) * len(costs.p2p)), deltas)
    return replace(problem, microbatches=len(size), features=(feature,))


@st.composite
def differing_problems(draw: st.DrawFn, *, max_p: int = 3, max_m: int = 5) -> Problem:
    """Random problems whose microbatches have a size, some of them a large one; memory is often tight."""
    problem = draw(problems(max_p=max_p, max_m=1, kinds=("v", "loop", "single")))
    size = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1 / 3, 7.0, 40.0])
    problem = with_sizes(problem, draw(st.lists(size, min_size=1, max_size=max_m)))
    headroom = st.sampled_from([0.0, 0.0, 1.0, 3.0, 10.0, 40.0])
    p = problem.pp_degree
    return limited(problem, tuple(draw(st.lists(headroom, min_size=p, max_size=p))))


@st.composite
def with_communication(draw: st.DrawFn) -> Problem:
    """Random problems with pairs."""
    problem = draw(problems(max_p=3, max_m=5, kinds=("v", "loop", "single")))
    forward, inputs, fused = (draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])) for _ in range(3))
    costs = problem.costs
    hidden = Communication(
        tuple(forward * each for each in costs.forward),
        tuple(inputs * each for each in costs.backward_input),
        tuple(fused * costs.fused(stage) for stage in range(problem.n_stages)),
    )
    return replace(problem, communication=hidden, pair_factor=draw(st.sampled_from([1.0, 1.05, 2.0])))


def decades(smallest: float = 1e-6, largest: float = 1e6) -> st.SearchStrategy[float]:
    """Positive floats over many decades, round ones and ones with all their digits."""
    exponents = st.floats(math.log10(smallest), math.log10(largest))
    return st.one_of(
        exponents.map(lambda exponent: 10.0**exponent),
        st.tuples(st.integers(1, 99), exponents).map(lambda drawn: drawn[0] * 10.0 ** int(drawn[1])),
        st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 1.0, 3.0]),
    )


@st.composite
def rough_problems(draw: st.DrawFn, *, max_p: int = 3, max_m: int = 4) -> Problem:
    """Problems as measurements make them: any placement, 1 to 4 chunks, costs over twelve decades.

    Some costs are 0, some backwards are fused, memory is often as tight as can be, and what a microbatch
    holds adds up to 0 only up to rounding.
    """
    kind: PlacementKind = draw(st.sampled_from(get_args(PlacementKind)))
    chunks = draw(st.integers(1, 4)) if kind == "loop" else None
    placement = Placement.of(kind, draw(st.integers(1, max_p)), chunks)
    n, p = placement.n_stages, placement.pp_degree
    cost = st.one_of(st.just(0.0), decades(), decades())

    def per_stage(of: st.SearchStrategy[float], count: int = n) -> tuple[float, ...]:
        if draw(st.booleans()):
            return (draw(of),) * count
        return tuple(draw(st.lists(of, min_size=count, max_size=count)))

    inputs, weights = per_stage(cost), per_stage(cost)
    backward = None
    if draw(st.booleans()):
        shares = per_stage(st.sampled_from([0.5, 0.7, 1.0, 1.1]))
        backward = tuple((i + w) * share for i, w, share in zip(inputs, weights, shares, strict=True))
    held = per_stage(st.one_of(st.just(0.0), decades()))
    released = [amount * draw(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0, 1.2])) for amount in held]
    leak = draw(st.sampled_from([0.0, 0.0, 1e-16, 9e-10, -9e-10]))
    lags = per_stage(cost, n - 1) if draw(st.booleans()) else (0.0,) * (n - 1)
    problem = Problem(
        placement=placement,
        microbatches=draw(st.integers(1, max_m)),
        costs=Costs(per_stage(cost), inputs, weights, lags, backward),
        memory=Memory(
            forward=held,
            backward_input=tuple(w - f for f, w in zip(held, released, strict=True)),
            backward_weight=tuple(
                min(0.0, -w + leak * (f + abs(w - f) + w)) for f, w in zip(held, released, strict=True)
            ),
            static=per_stage(st.one_of(st.just(0.0), decades()), p),
        ),
        objective=draw(st.sampled_from(["span", "makespan"])),
    )
    if draw(st.booleans()):
        return problem
    room = per_stage(st.sampled_from([0.0, 0.0, 1e-12, 0.5, 2.0, 30.0]), p)
    extra = (need * share for need, share in zip(problem.smallest_limit, room, strict=True))
    return limited(problem, tuple(extra))


def in_other_units(problem: Problem, time: float, memory: float) -> Problem:
    """The problem with all times and all amounts of memory multiplied."""

    def times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
        return tuple(value * factor for value in values)

    def scaled(part: Any, factor: float) -> Any:
        fields = {name: value for name, value in vars(part).items() if value is not None}
        return replace(part, **{name: times(value, factor) for name, value in fields.items()})

    def both(owner: Any) -> Any:
        return replace(owner, costs=scaled(owner.costs, time), memory=scaled(owner.memory, memory))

    whole: Problem = both(problem)
    return replace(whole, features=tuple(both(feature) for feature in problem.features))


_SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@st.composite
def with_copies(draw: st.DrawFn) -> Problem:
    """Problems with copies to the host, without a limit of memory."""
    problem = draw(problems(max_p=3, max_m=4, kinds=("v", "loop", "single")))
    out, back, moved = draw(st.tuples(_SHARES, _SHARES, _SHARES))
    costs = problem.costs
    host = tuple(draw(_SHARES) * each for each in problem.without_copies().smallest_limit)
    copies = Copies(
        tuple(4 * out * each for each in costs.forward),
        tuple(4 * back * each for each in costs.backward_input),
        tuple(moved * each for each in problem.memory.forward),
        draw(st.none() | st.just(host)),
    )
    return replace(problem, copies=copies)
