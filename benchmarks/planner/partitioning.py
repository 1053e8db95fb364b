"""Compare cuts of GPT-like models with a large vocabulary: an even cut, GPipe's cut, and zbv's.

A head of V tokens on blocks of width h costs 2 h V floating-point operations a token against 24 h^2 + 4 h s
of a block (Narayanan et al. 2021, appendix), so V / (12 h + 2 s) blocks: 2.3 of them at V = 128 k, h = 4096.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zbv_solver.construct.baselines import without_limit
from zbv_solver.errors import InfeasibleMemory
from zbv_solver.partition.balance import balanced_cut
from zbv_solver.partition.cut_space import Boundaries, CutSpace, CutTables
from zbv_solver.partition.first_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.plans.plan import gap_of
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

VOCABULARY, SEQUENCE = 128_000, 4096
MODELS = (
    (4, 32, 2560, 1),
    (8, 32, 4096, 1),
    (8, 48, 4096, 1),
    (16, 64, 4096, 1),
    (32, 96, 4096, 1),
    (32, 96, 4096, 2),
    (32, 128, 4096, 1),
)
"""Ranks, blocks, width, and layers per block; with 2, attention and MLP are separate layers."""
HELD_BY_ATTENTION = 11 / 30
"""Of a block's activations without the scores (FlashAttention): Korthikanti et al. 2022, section 4.1."""
KEPT = 2 / 34
"""Of a block's activations, what is its input: the same section."""
ROOMS = (0.15, 0.3, 0.5, 0.8)
RECOMPUTED_CASE = (8, 32, 4096)
MICROBATCHES_PER_RANK = 4
ROOM = 1.0
"""Memory limit, as a share of the memory of 1F1B with evenly cut blocks."""


def gpt_layers(
    p: int,
    blocks: int,
    width: int,
    layers_per_block: int = 1,
    *,
    room: float = ROOM,
    can_recompute: bool = False,
) -> LayeredProblem:
    """A GPT with a vocabulary of 128 k. F of a block takes 1 and allocates 2, of which I releases half.

    The memory limit is ``room`` times the memory of 1F1B with evenly cut blocks.
    """
    block = 24 * width**2 + 4 * width * SEQUENCE
    head = 2 * width * VOCABULARY / block
    document: dict[str, Any] = {
        "pp_degree": p,
        "microbatches": MICROBATCHES_PER_RANK * p,
        "layers": [
            {"name": "embedding", "forward": 0.02, "backward_input": 0, "backward_weight": 0.05},
            *(
                {**each, "recompute": _again(each)} if can_recompute else each
                for each in _blocks(
                    blocks, 4 * width * SEQUENCE / block, 16 * width**2 / block, layers_per_block
                )
            ),
            {"name": "head", "forward": head, "backward_input": head, "backward_weight": head},
        ],
        "costs": {"p2p": 0.02},
        "memory": {"limit": room * 2 * blocks},
    }
    layered = parse_any_problem(document)
    if not isinstance(layered, LayeredProblem):
        raise TypeError("layers without a partition are a layered problem; this is a bug in the benchmark.")
    return layered


def _blocks(blocks: int, scores: float, mlp: float, layers_per_block: int) -> list[dict[str, Any]]:
    """Whole blocks, or attention and MLP apart; ``scores`` and ``mlp`` are shares of a block's F.

    Attention scores have no weights, so their backward belongs to I.
    """
    if layers_per_block == 1:
        return [{"name": "block", "repeat": blocks, **_part(1.0, scores, 1.0)}]
    halves = (
        ("attention", _part(1 - mlp, scores, HELD_BY_ATTENTION)),
        ("mlp", _part(mlp, 0.0, 1 - HELD_BY_ATTENTION)),
    )
    return [{"name": f"{name}.{block}", **part} for block in range(blocks) for name, part in halves]


def _part(forward: float, scores: float, held: float) -> dict[str, Any]:
    return {
        "forward": forward,
        "backward_input": forward + scores,
        "backward_weight": forward - scores,
        "memory": {"forward": 2 * held, "backward_input": -held, "backward_weight": -held},
    }


def _again(part: dict[str, Any]) -> dict[str, Any]:
    """Costs with recomputation: F runs again before I, and only the input is kept."""
    kept, held = KEPT * part["memory"]["forward"], -part["memory"]["backward_weight"]
    return {
        "backward_input": part["backward_input"] + part["forward"],
        "memory": {
            "forward": kept,
            "backward_input": held - kept,
            "backward_weight": -held,
            "workspace": held,
        },
    }


def cut_table(
    options: SearchOptions,
    write: Callable[[str], object],
    models: Sequence[tuple[int, int, int, int]] = MODELS,
) -> None:
    """Write a row per model: the objective of the same search on three cuts, and the bound of all cuts.

    For blocks in parts, the even cut is the better of an even cut of parts and one of whole blocks.
    """
    write(f"objective of one search (effort {options.effort}) on three cuts; head in blocks\n")
    write(
        f"{'p':>3} {'blocks':>6} {'parts':>5} {'head':>5} {'m':>4} {'even':>9} {'histogram':>9} {'zbv':>9} "
    )
    write(f"{'to even':>8} {'to hist.':>8} {'bound':>9} {'gap':>7} {'seconds':>7}\n")
    for p, blocks, width, parts in models:
        layered = gpt_layers(p, blocks, width, parts)
        evenly = {parts: layered, 1: gpt_layers(p, blocks, width)}
        even = min(_on(model, even_cut, options) for model in evenly.values())
        histogram, plan = _on(layered, histogram_cut, options), search(layered, options)
        own, bound = plan.objective, 0.0 if plan.cut is None else plan.cut.lower_bound
        write(
            f"{p:>3} {blocks:>6} {parts:>5} {layered.model.layers[-1].costs.forward:>5.2f} "
            f"{layered.microbatches:>4} {even:>9.2f} {histogram:>9.2f} {own:>9.2f} "
            f"{own / even - 1:>8.1%} {own / histogram - 1:>8.1%} "
            f"{bound:>9.2f} {gap_of(own, bound):>7.2%} {plan.provenance.seconds:>7.1f}\n"
        )


def _on(layered: LayeredProblem, rule: Callable[[CutSpace], Boundaries], options: SearchOptions) -> float:
    """Objective of a search on a rule's cut; without a memory limit if the cut does not fit."""
    space = CutSpace(layered, layered.placements[0], CutTables.of(layered))
    bounds = rule(space)
    fitting = space.fitting(bounds)
    cut = fitting or space.cut(bounds, (False,) * space.n_stages)
    problem = layered.cut_into(space.placement, cut)
    return search(problem if fitting else without_limit(problem), options).objective


def recompute_table(options: SearchOptions, write: Callable[[str], object]) -> None:
    """Write a table of searches with no stage recomputed, with all stages, and with a free choice."""
    p, blocks, _ = RECOMPUTED_CASE
    write(f"\nrecomputation: {p} ranks, {blocks} blocks, one search within a share of 1F1B's memory\n")
    write(f"{'share':>5} {'none':>9} {'all':>9} {'zbv':>9} {'stages':>6} {'bound':>9} {'seconds':>7}\n")
    for room in ROOMS:
        layered = gpt_layers(*RECOMPUTED_CASE, room=room, can_recompute=True)
        plan = search(layered, options)
        model = plan.problem.model
        stages = 0 if model is None else sum(model.cut.recompute)
        none, every = (_recomputed(layered, again, options) for again in (False, True))
        write(
            f"{room:>5.2f} {none:>9} {every:>9} {plan.objective:>9.2f} {stages:>6} "
            f"{0 if plan.cut is None else plan.cut.lower_bound:>9.2f} {plan.provenance.seconds:>7.1f}\n"
        )


def _recomputed(layered: LayeredProblem, again: bool, options: SearchOptions) -> str:
    """Objective of the search on the most even cut with all stages recomputed, or with none."""
    tables = CutTables.of(replace(layered, limit=None))
    space = CutSpace(layered, layered.placements[0], tables)
    balanced = balanced_cut(space, level_cut(space))
    if balanced is None:
        raise RuntimeError("without a limit there is always a cut; this is a bug in zbv.")
    cut = replace(balanced.cut, recompute=(again,) * space.n_stages)
    try:
        return f"{search(layered.cut_into(space.placement, cut), options).objective:.2f}"
    except InfeasibleMemory:
        return "-"
