"""A plan for torchtitan: its settings, and the schedule CSV inside the same file.

The file is TOML and holds the settings that a plan fixes. The CSV of :mod:`zbv_solver.export.torch_csv` is in
it as comments, because torchtitan reads a schedule from a separate file and refuses settings that it does
not know; the head of the file has the command that extracts it, and the same settings as flags.

Why these settings: torchtitan takes the order from ``pipeline_parallel_schedule_csv``, but cuts the
model by ``pipeline_parallel_schedule`` (so a plan with V placement needs a V schedule named there), and takes
the number of microbatches from ``local_batch_size`` over ``pipeline_parallel_microbatch_size``. A split
backward works with neither ``torch.compile`` nor recomputation of single operators.
"""

from __future__ import annotations

import json

from zbv_solver.errors import InvalidInput
from zbv_solver.export import torch_csv
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import Problem, W

CSV_MARK = "#csv "
"""The prefix of a row of the schedule in the file."""

_SCHEDULES = {"v": "ZBVZeroBubble", "loop": "Interleaved1F1B", "single": "1F1B"}
"""A schedule of torchtitan with the plan's placement; its order is not used."""

Settings = dict[str, dict[str, str | int | bool]]


def render(plan: Plan) -> str:
    """The settings as TOML, with the schedule's rows in comments.

    Raises
    ------
    InvalidInput
        For more than two stages per rank in loops: torchtitan counts those by layers, which a plan does not
        know.
    """
    name = f"plan-{plan.plan_id[:12]}.csv"
    settings = settings_of(plan, name)
    rows = torch_csv.render(plan).splitlines()
    return "\n".join(
        [
            *_head(plan, name, settings),
            "",
            *_toml(settings),
            "# The schedule: one row per rank.",
            *(f"{CSV_MARK}{row}" for row in rows),
            "",
        ]
    )


def settings_of(plan: Plan, csv_name: str) -> Settings:
    """The settings of a plan, by section; raises like :func:`render`."""
    placement = plan.problem.placement
    if placement.kind == "loop" and placement.chunks != 2:
        raise InvalidInput.at(
            "/problem/chunks",
            f"found {placement.chunks} stages per rank; torchtitan makes two of a looped schedule unless "
            f"layers per stage are counted, which a plan does not know. Export torch-csv, and set "
            f"parallelism.module_fqns_per_model_part for the {placement.n_stages} stages yourself.",
        )
    settings: Settings = {
        "parallelism": {
            "pipeline_parallel_degree": placement.pp_degree,
            "pipeline_parallel_schedule": _SCHEDULES[placement.kind],
            "pipeline_parallel_schedule_csv": csv_name,
            "pipeline_parallel_microbatch_size": 1,
        },
        "training": {"local_batch_size": plan.problem.microbatches},
    }
    if bool((plan.orders.letter == W).any()):
        settings["compile"] = {"enable": False}
        settings["activation_checkpoint"] = {"mode": "none"}
    return settings


def _head(plan: Plan, csv_name: str, settings: Settings) -> list[str]:
    problem = plan.problem
    flags = [
        f"--{section}.{key} {value}" if not isinstance(value, bool) else f"--{section}.no_{key}"
        for section, entries in settings.items()
        for key, value in entries.items()
    ]
    return [
        f"# zbv plan {plan.plan_id}",
        f"# {problem.pp_degree} ranks, {problem.n_stages} stages, {problem.microbatches} microbatches",
        "#",
        "# Put these settings into torchtitan's configuration, and take the schedule out of this file:",
        f"#   sed -n 's/^{CSV_MARK}//p' THIS_FILE > {csv_name}",
        "# The same as flags:",
        *(f"#   {flag}" for flag in flags),
        "#",
        f"# Every step needs exactly {problem.microbatches} microbatches: keep local_batch_size at that many",
        "# times pipeline_parallel_microbatch_size. Cut the model into the stages that the plan's costs are",
        "# of (parallelism.module_fqns_per_model_part).",
        *_batch_order(plan),
        *_cut(problem),
    ]


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


def _cut(problem: Problem) -> list[str]:
    """The layers and the recomputation of every stage, by our names, which torchtitan does not know."""
    model = problem.model
    if model is None:
        return []
    lines = ["#", "# The stages by the names of the plan's layers:"]
    lines += [f"#   {stage}: {json.dumps(names)}" for stage, names in enumerate(model.partition)]
    recomputed = [str(stage) for stage, is_so in enumerate(model.cut.recompute) if is_so]
    if recomputed:
        lines += [
            f"# Planned to be recomputed: {', '.join(recomputed)}.",
            "# torchtitan recomputes all stages or none, and none where backwards are split: wrap modules of",
            "# these stages in torch.utils.checkpoint yourself, or they need more memory than planned.",
        ]
    return lines


def _toml(settings: Settings) -> list[str]:
    lines = []
    for section, entries in settings.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in entries.items()]
        lines.append("")
    return lines


def _toml_value(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
