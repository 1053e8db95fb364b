"""The rules of a cut for an executor: what ``cut.first``, ``last`` and ``allow_empty`` mean on its ranks.

Megatron-LM's first and last pipeline stages are ranks, and it deals their transformer layers evenly over
their virtual stages (``__post_init__`` in ``megatron/core/transformer/transformer_config.py``,
``get_num_layers_to_build`` in ``megatron/core/transformer/transformer_block.py``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layered_problem import LayeredProblem, contradiction

from zbv_models.fixed_orders.schedules import Schedule


def placed_on(problem: LayeredProblem, schedule: Schedule, allow_empty: bool) -> LayeredProblem:
    """The layers on a schedule's placement, with rules of stages in place of those of ranks.

    Parameters
    ----------
    allow_empty
        Whether the executor allows empty stages.

    Raises
    ------
    InvalidInput
        When no cut under this schedule keeps the rules, with the reason.
    """
    placement, rules = schedule.placement, problem.rules
    p, chunks = placement.pp_degree, placement.chunks
    if p != problem.pp_degree or schedule.microbatches != problem.microbatches:
        raise InvalidInput.at(
            "",
            f"found a schedule for {p} ranks and {schedule.microbatches} microbatches; the problem has "
            f"{problem.pp_degree} and {problem.microbatches}.",
        )
    rules = replace(rules, allow_empty=allow_empty and rules.allow_empty is not False)
    if placement.kind != "v":
        if lost := contradiction(problem, p, "ranks"):
            raise InvalidInput.at("/cut", lost)
        rules = replace(
            rules, first=_share("first", rules.first, chunks), last=_share("last", rules.last, chunks)
        )
        if chunks > 1 and not rules.allow_empty and 0 in (rules.first, rules.last):
            name = "first" if rules.first == 0 else "last"
            raise InvalidInput.at(
                f"/cut/{name}",
                f"found 0 transformer layers on the {name} rank, which has {chunks} virtual stages; one of "
                f"them would be empty. Give at least {chunks}, or use one virtual stage.",
            )
    return replace(
        problem,
        placement=placement.kind,
        chunks=chunks if placement.kind == "loop" else None,
        rules=rules,
        blocking=problem.blocking or schedule.blocking,
    )


def _share(name: str, count: int | None, chunks: int) -> int | None:
    """The transformer layers of one stage of the first or the last rank."""
    if count is None:
        return None
    share, rest = divmod(count, chunks)
    if rest:
        raise InvalidInput.at(
            f"/cut/{name}",
            f"found {count} transformer {'layer' if count == 1 else 'layers'} on the {name} rank, which has "
            f"{chunks} virtual stages; they must divide evenly. Give a multiple of {chunks}, or other "
            "virtual stages.",
        )
    return share


def inner_sizes(placed: LayeredProblem, schedule: Schedule) -> dict[int, int]:
    """The prescribed numbers of parts of stages other than the first and the last one.

    Raises :class:`InvalidInput` when parts have several transformer layers, so that sizes prescribe too much.
    """
    placement, rules = schedule.placement, placed.rules
    ends = [(0, rules.first), (placement.pp_degree - 1, rules.last)]
    if placement.kind != "loop":
        return {}
    inner = range(1, placement.n_stages - 1)
    found = {
        stage: size
        for rank, size in ends
        if size is not None
        for stage in placement.stages_of[rank]
        if stage in inner
    }
    if found and np.diff(np.array(placed.model.blocks_before)[placed.places]).max() > 1:
        raise InvalidInput.at(
            "/cut/together",
            "found groups of several transformer layers, with cut.first or cut.last and several virtual "
            "stages. Remove one of these rules, or use one virtual stage.",
        )
    return found
