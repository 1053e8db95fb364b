"""A plan for torchtitan's own runtime: its settings, with the order of the actions in them.

The settings are those of :mod:`zbv_solver.export.torchtitan_settings`, and the order is the CSV of
:mod:`zbv_solver.export.torch_csv`. torchtitan takes the order from ``pipeline_parallel_schedule_csv``, but
places the stages by ``pipeline_parallel_schedule``, so a schedule with the plan's placement is named there.
"""

from __future__ import annotations

import json

from zbv_solver.errors import InvalidInput
from zbv_solver.export import torch_csv
from zbv_solver.export.torchtitan_settings import TitanSettings, module_names
from zbv_solver.partition.modules import Modules
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.layer_letters import EMBEDDING, LOSS, PART
from zbv_solver.problem.problem import W

_SCHEDULES = {"v": "ZBVZeroBubble", "loop": "Interleaved1F1B", "single": "1F1B"}
"""A schedule of torchtitan with the plan's placement; its order is not used."""


def render(plan: Plan) -> str:
    """The settings, with the schedule's rows.

    Raises
    ------
    InvalidInput
        When there are more than two stages per rank in loops, and the plan's layers are not those of a
        language model: torchtitan counts such stages by the names of their modules.
    """
    problem, placement = plan.problem, plan.problem.placement
    model = problem.model
    parts = None if model is None else _parts(model)
    if parts is None and placement.kind == "loop" and placement.chunks != 2:
        raise InvalidInput.at(
            "/problem/chunks",
            f"found {placement.chunks} stages per rank; torchtitan makes two of a looped schedule unless "
            f"their modules are named, which the plan does not know. Export torch-csv, and set "
            f"parallelism.module_fqns_per_model_part for the {placement.n_stages} stages yourself.",
        )
    is_split = bool((plan.orders.letter == W).any())
    recompute = _recomputation(model, is_split)
    settings = TitanSettings(
        placement.pp_degree,
        _SCHEDULES[placement.kind],
        problem.microbatches,
        parts,
        recompute,
        is_split,
        rows=torch_csv.render(plan),
    )
    notes = [
        "#",
        f"# zbv plan {plan.plan_id}",
        f"# {problem.pp_degree} ranks, {problem.n_stages} stages, {problem.microbatches} microbatches",
    ]
    if is_split and recompute == "all":
        notes += [
            "# The step will take longer than planned: torch recomputes a stage again in I and for every",
            "# gradient of W. Plan without recomputation, or with fused backwards only.",
        ]
    return settings.text([*notes, *_batch_order(plan), *_cut(model, parts)])


def _recomputation(model: CutModel | None, is_split: bool) -> str | None:
    """What torchtitan recomputes. Its default, ``SelectiveAC``, does not work with split backwards."""
    recomputed = set(() if model is None else model.cut.recompute)
    if model is not None and recomputed == {True} and not _foreign(model):
        return "selective" if "op" in model.model.recompute_modules else "all"
    return "none" if recomputed or is_split else None


def _foreign(model: CutModel) -> tuple[str, ...]:
    """The modules that a plan recomputes and torchtitan cannot: those of Megatron-LM."""
    modules = model.model.recompute_modules
    return () if "op" in modules or not any(model.cut.recompute) else tuple(modules)


def _parts(model: CutModel) -> list[list[str]] | None:
    """The modules of every stage; None if the plan's layers are not those of torchtitan's models."""
    try:
        modules, bounds = Modules.of(model.model), model.cut.bounds
        divides_one = any(PART in modules.letters[begin : begin + 1] for begin in bounds[1:-1])
        if divides_one or not {EMBEDDING, LOSS} <= set(modules.letters):
            return None
        return module_names(tuple(map(modules.of_stage, bounds[:-1], bounds[1:])))
    except InvalidInput:
        return None


def _batch_order(plan: Plan) -> list[str]:
    """What a batch of microbatches that differ must look like."""
    order = torch_csv.batch_order(plan)
    if order is None:
        return []
    return [
        "#",
        "# The microbatches differ. Give the batch in this order of the plan's microbatches, because",
        "# torchtitan numbers them in the order in which they run:",
        f"#   {', '.join(map(str, order))}",
    ]


def _cut(model: CutModel | None, parts: list[list[str]] | None) -> list[str]:
    """What torchtitan does not get to know of the cut and of recomputation."""
    lines = []
    if parts is None:
        lines += [
            "#",
            "# Cut the model into the stages that the plan's costs are of, by",
            "# parallelism.module_fqns_per_model_part.",
        ]
    if model is None:
        return lines
    if parts is None:
        lines.append("# The stages by the names of the plan's layers:")
        lines += [f"#   {stage}: {json.dumps(names)}" for stage, names in enumerate(model.partition)]
    recomputed = [str(stage) for stage, is_so in enumerate(model.cut.recompute) if is_so]
    if foreign := _foreign(model):
        lines += [
            "#",
            f"# Planned to be recomputed: {', '.join(foreign)} of the stages {', '.join(recomputed)}.",
            "# torchtitan recomputes whole blocks, or its own choice of operations: wrap these modules in",
            "# torch.utils.checkpoint yourself, or they need more memory than planned.",
        ]
    elif recomputed and len(recomputed) < len(model.partition):
        lines += [
            "#",
            f"# Planned to be recomputed: {', '.join(recomputed)}.",
            "# torchtitan recomputes all stages or none: wrap modules of these stages in",
            "# torch.utils.checkpoint yourself, or they need more memory than planned.",
        ]
    return lines
