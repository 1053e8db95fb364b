"""Layered problems for tests: given ones, random ones, and every cut there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from typing import Any

from hypothesis import strategies as st
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.cut_space import CutSpace, CutTables
from zbv_solver.problem.cut import Cut, Link
from zbv_solver.problem.layer import LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Placement

from support.layered import LAYERED, layered_problem

BLOCK = {
    **{"name": "block", "forward": 2, "backward_input": 2, "backward_weight": 1},
    "memory": {"forward": 4, "backward_input": -2, "backward_weight": -2, "static": 1},
    **{"output_bytes": 100, "repeat": 8},
}
EMBEDDING = LAYERED["layers"][0]
HEAD = {"name": "head", "forward": 5, "backward_input": 5, "backward_weight": 5}
AGAIN = {"forward": 1, "backward_input": 1, "backward_weight": -2, "workspace": 2}
RECOMPUTE = {"backward_input": 4, "memory": AGAIN}
KEPT = {"forward": 0.5, "backward_weight": -0.5}
SLOW = {"slow": {"forward": 6, "backward_input": 5, "memory": {"forward": 3, "backward_weight": -3}}}
LINKS = [{"latency": 1, "bandwidth": 100}, {"latency": 2, "bandwidth": 50}, {"latency": 5, "bandwidth": 25}]
MIXED: dict[str, Any] = {
    "pp_degree": 3,
    "layers": [EMBEDDING, {**BLOCK, "on": SLOW}, HEAD],
    "devices": ["fast", "fast", "slow"],
    "costs": {"link": LINKS},
}
"""Changes of a :func:`document`: ten layers on three ranks, the last of which is slow."""


def document(**changes: Any) -> dict[str, Any]:
    """A GPT-like model of ten layers on two ranks."""
    layers = [EMBEDDING, BLOCK, HEAD]
    return {"pp_degree": 2, "microbatches": 4, "layers": layers, "costs": {"p2p": 0.5}, **changes}


def layered(**changes: Any) -> LayeredProblem:
    return layered_problem(document(**changes))


@st.composite
def layered_problems(
    draw: st.DrawFn,
    /,
    most_layers: int = 7,
    placements: tuple[str, ...] = ("v", "single"),
    mixed: bool = False,
    **changes: Any,
) -> LayeredProblem:
    """Small layered problems of every kind; memory is tight often, and sometimes too tight.

    With ``mixed``, ranks have different devices and links.
    """

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    p = draw(st.integers(2 if mixed else 1, 3))
    layers = []
    for number in range(draw(st.integers(1, most_layers))):
        held = one(0, 1, 2, 4)
        memory = {"forward": held, "backward_input": 0, "backward_weight": -held}
        layer: dict[str, Any] = {
            **{"name": f"layer{number}", "forward": one(0, 1, 2, 9), "backward_input": one(0, 1, 3)},
            **{"backward_weight": one(0, 1, 2), "backward": one(None, None, 1, 4)},
            "memory": {**memory, "static": one(0, 0, 2), "workspace": one(0, 0, 1)},
        }
        if draw(st.booleans()):
            layer["recompute"] = {"backward_input": one(2, 4), "memory": {**KEPT, "workspace": one(0, 2)}}
        layers.append(layer)
    rules: dict[str, Any] = {"allow_empty": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        rules["first"] = draw(st.integers(1, 2))
    if draw(st.integers(0, 3)) == 0:
        rules["last"] = draw(st.integers(1, 2))
    if len(layers) > 1 and draw(st.integers(0, 3)) == 0:
        begin = draw(st.integers(0, len(layers) - 2))
        rules["together"] = [[f"layer{begin}", f"layer{begin + 1}"]]
    body = {
        "pp_degree": p,
        "microbatches": draw(st.integers(1, 3)),
        "placement": one(*placements),
        "layers": layers,
        "cut": rules,
        "memory": {"limit": one(None, 5, 8, 12, 30)},
        **changes,
    }
    if mixed:
        body["devices"] = ["fast", "slow", one("fast", "slow")][:p]
        body["costs"] = {"link": [{"latency": draw(st.integers(0, 2)), "bandwidth": 50} for _ in range(p)]}
        for each in layers:
            each["output_bytes"] = one(0, 100)
            if draw(st.integers(0, 3)):
                each["on"] = {"slow": _slower(draw, each)}
    try:
        return layered_problem(body)
    except InvalidInput:
        # Too few layers for the stages, or rules that contradict each other.
        alike = [{key: value for key, value in each.items() if key != "on"} for each in layers]
        body = {**body, "layers": alike, "devices": None, "costs": None}
        return layered_problem(body, pp_degree=1, placement="single", cut={})


def _slower(draw: st.DrawFn, layer: dict[str, Any]) -> Any:
    """Costs of a layer on another device, which takes two or three times as long, or less for a backward."""
    factor = draw(st.sampled_from((2, 3)))
    found: Any = {"forward": factor * layer["forward"], "backward_input": draw(st.sampled_from((0, 2, 5)))}
    if draw(st.booleans()):
        held = draw(st.sampled_from((0, 3)))
        found["memory"] = {"forward": held, "backward_weight": -held, "static": 1, "workspace": 1}
    if "recompute" in layer:
        found["recompute"] = {"backward_input": draw(st.sampled_from((4, 8))), "memory": KEPT}
    return found


def every_cut(problem: LayeredProblem, placement: Placement) -> Iterator[Problem]:
    """Every cut that the rules and the memory limit allow, by enumeration."""
    n, stages, rules = problem.model.n_layers, placement.n_stages, problem.rules
    places = problem.model.place
    variants = product((False, True), repeat=stages) if problem.model.can_recompute else [(False,) * stages]
    recompute = list(variants)
    for inner in combinations_with_replacement(range(n + 1), stages - 1):
        bounds = (0, *inner, n)
        if not rules.allow_empty and any(end == begin for begin, end in pairwise(bounds)):
            continue
        if rules.first not in (None, bounds[1]) or rules.last not in (None, n - bounds[-2]):
            continue
        if any(places[group[0]] < bound <= places[group[-1]] for group in rules.together for bound in inner):
            continue
        for choice in recompute:
            found = problem.cut_into(placement, Cut.at(bounds, choice))
            needed = found.smallest_limit
            if all(
                need <= most + 1e-6 for need, most in zip(needed, found.memory.limit or needed, strict=True)
            ):
                yield found


def space_of(problem: LayeredProblem) -> CutSpace:
    """The cuts into stages of the first placement."""
    return CutSpace(problem, problem.placements[0], CutTables.of(problem))


def worst_load(problem: Problem) -> float:
    """Work of the most loaded rank for one microbatch."""
    return max(map(problem.busy_time, range(problem.pp_degree))) / problem.microbatches


def layered_in_other_units(problem: LayeredProblem, time: float, memory: float) -> LayeredProblem:
    """The problem with all times and all amounts of memory multiplied."""

    def scaled(costs: LayerCosts) -> LayerCosts:
        return LayerCosts(
            costs.forward * time,
            costs.backward_input * time,
            costs.backward_weight * time,
            None if costs.backward is None else costs.backward * time,
            LayerMemory(**{name: value * memory for name, value in vars(costs.memory).items()}),
        )

    layers = [layer.with_costs(scaled) for layer in problem.model.layers]
    link = problem.link
    return replace(
        problem,
        model=Model(tuple(layers)),
        p2p=problem.p2p * time,
        link=None if link is None else Link(link.latency * time, link.bandwidth / time),
        static=tuple(value * memory for value in problem.static),
        limit=None if problem.limit is None else tuple(value * memory for value in problem.limit),
    )
