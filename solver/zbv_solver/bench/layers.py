"""How much the cut is worth: GPT-like models with a large vocabulary, cut by hand, by GPipe's rule and by us.

A head of V tokens on blocks of width h costs 2 h V floating-point operations a token against 24 h^2 + 4 h s
of a block (Narayanan et al. 2021, appendix), so V / (12 h + 2 s) blocks: 2.3 of them at V = 128 k, h = 4096.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from zbv_solver.layers.balance import balanced_cut
from zbv_solver.layers.layered_problem import LayeredProblem
from zbv_solver.layers.reading import parse_question
from zbv_solver.layers.simple_cuts import even_cut, histogram_cut, level_cut
from zbv_solver.layers.space import CutSpace
from zbv_solver.layers.tables import CutTables
from zbv_solver.plan import Plan, gap_of
from zbv_solver.problem import Problem
from zbv_solver.search import SearchOptions, search

VOCABULARY, SEQUENCE = 128_000, 4096
MODELS = ((4, 32, 2560), (8, 32, 4096), (8, 48, 4096), (16, 64, 4096), (32, 96, 4096), (32, 128, 4096))
"""Ranks, blocks and width."""
MICROBATCHES_PER_RANK = 4
ROOM = 1.0
"""Memory limit, as a share of what 1F1B holds with evenly cut blocks."""
PARTITION_CASE = (32, 198, 4096)
REPEATS = 5


@dataclass(frozen=True)
class CutRow:
    """One model: the objective of the same search on three cuts, and the bound on any cut."""

    pp_degree: int
    blocks: int
    width: int
    head: float
    even: Plan
    histogram: Plan
    plan: Plan

    @property
    def lower_bound(self) -> float:
        """No contiguous cut has a plan below."""
        return self.plan.cut.lower_bound if self.plan.cut is not None else 0.0


def gpt_layers(p: int, blocks: int, width: int, microbatches: int | None = None) -> LayeredProblem:
    """A GPT with a vocabulary of 128 k; a block's F takes 1 and holds 2, of which I releases half."""
    block = 24 * width**2 + 4 * width * SEQUENCE
    head = 2 * width * VOCABULARY / block
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1}
    # Attention scores have no weights: their backward is I's.
    scores = 4 * width * SEQUENCE / block
    document: dict[str, Any] = {
        "pp_degree": p,
        "microbatches": microbatches or MICROBATCHES_PER_RANK * p,
        "layers": [
            {"name": "embedding", "forward": 0.02, "backward_input": 0, "backward_weight": 0.05},
            {
                "name": "block",
                "repeat": blocks,
                "forward": 1,
                "backward_input": 1 + scores,
                "backward_weight": 1 - scores,
                "memory": memory,
            },
            {"name": "head", "forward": head, "backward_input": head, "backward_weight": head},
        ],
        "costs": {"p2p": 0.02},
        "memory": {"limit": ROOM * 2 * blocks},
    }
    layered = parse_question(document)
    if not isinstance(layered, LayeredProblem):
        raise TypeError("layers without a partition are a layered problem; this is a fault of ours.")
    return layered


def cut_row(p: int, blocks: int, width: int, options: SearchOptions) -> CutRow:
    """The same search on the even cut, on the histogram cut, and with the cut free."""
    layered = gpt_layers(p, blocks, width)
    space = CutSpace(layered, layered.placements[0], CutTables.of(layered))

    def on(bounds: tuple[int, ...]) -> Plan:
        recompute = space.fitting(bounds)
        problem = layered.cut_into(space.placement, space.cut(bounds, recompute or (False,) * space.n_stages))
        return search(problem if recompute else _without_limit(problem), options)

    head = layered.model.layers[-1].costs.forward
    return CutRow(
        p, blocks, width, head, on(even_cut(space)), on(histogram_cut(space)), search(layered, options)
    )


def _without_limit(problem: Problem) -> Problem:
    return replace(problem, memory=replace(problem.memory, limit=None))


def partition_seconds() -> float:
    """Median time of the balanced cut of 200 layers on 32 ranks, from the layers on."""
    layered = gpt_layers(*PARTITION_CASE)
    seconds = []
    for _ in range(REPEATS + 1):  # the first loads the kernels
        began = time.perf_counter()
        space = CutSpace(layered, layered.placements[0], CutTables.of(layered))
        balanced_cut(space, level_cut(space))
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[REPEATS // 2]


def cut_table(options: SearchOptions, write: Callable[[str], object]) -> None:
    """Write the table, a row as soon as it is there."""
    write(f"objective of one search (effort {options.effort}) on three cuts; head in blocks\n")
    write(f"{'p':>3} {'blocks':>6} {'head':>5} {'m':>4} {'even':>9} {'histogram':>9} {'zbv':>9} ")
    write(f"{'to even':>8} {'to hist.':>8} {'bound':>9} {'gap':>7} {'seconds':>7}\n")
    for p, blocks, width in MODELS:
        row = cut_row(p, blocks, width, options)
        own = row.plan.objective
        write(
            f"{p:>3} {blocks:>6} {row.head:>5.2f} {row.plan.problem.microbatches:>4} "
            f"{row.even.objective:>9.2f} {row.histogram.objective:>9.2f} {own:>9.2f} "
            f"{own / row.even.objective - 1:>8.1%} {own / row.histogram.objective - 1:>8.1%} "
            f"{row.lower_bound:>9.2f} {gap_of(own, row.lower_bound):>7.2%} "
            f"{row.plan.provenance.seconds:>7.1f}\n"
        )
    p, blocks, _ = PARTITION_CASE
    write(f"partition alone, {blocks + 2} layers on {p} ranks: {partition_seconds():.3f} s\n")
