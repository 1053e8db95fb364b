"""The best cut for an executor: its schedules, its rules for stages, and its settings for the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from zbv_solver.documents.files import plain
from zbv_solver.errors import InvalidInput
from zbv_solver.export.torchtitan import REPEATED, StepSizes, TitanSettings, module_names
from zbv_solver.partition.modules import Modules
from zbv_solver.partition.runs import First
from zbv_solver.problem.layer import DECODER, LOSS, MTP, letter_of
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import MAX_CHUNKS
from zbv_solver.problem.problem import Problem
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import Effort

from zbv_models.fixed_orders.best_cut import BestCut, Recompute, best_cut
from zbv_models.fixed_orders.megatron_layout import Stages, layout_flags, recompute_flags, write_layout
from zbv_models.fixed_orders.schedules import (
    TORCH_DEFAULTS,
    Schedule,
    megatron_schedule,
    schedules_of,
    torch_schedule,
    torch_schedule_name,
)

EXECUTORS = {"megatron": "Megatron-LM", "torch": "PyTorch", "torchtitan": "torchtitan"}
"""Names in documents and flags, and in texts."""


@dataclass(frozen=True, eq=False)
class ExecutorCut:
    """The best cut for an executor."""

    executor: str
    best: BestCut
    stages: Stages | None
    """The modules of every stage as letters; None for ``torch``, which does not name modules."""
    settings: str | None
    """Flags of Megatron-LM or a function for torchtitan; None if the executor cannot express the result."""
    remark: str = ""
    """Why there are no settings; empty if there are."""
    even_remark: str = ""
    """What the even cut is if the executor has none by itself; empty if it is the executor's own."""

    @property
    def shortest_layout(self) -> str | None:
        """The shortest cut as ``zbv cut --layout`` takes it; None without modules."""
        if self.stages is None or self.best.shortest.model is None:
            return None
        return write_layout(stage_letters(self.best.shortest, Modules.of(self.best.shortest.model.model)))


def cut_for_executor(
    problem: LayeredProblem,
    executor: str,
    *,
    virtual_stages: Sequence[int] | None = None,
    group: int | None = None,
    schedules: Sequence[str] = (),
    recompute: Recompute | None = None,
    recompute_layers: int | None = None,
    effort: Effort = "standard",
    seed: int = 0,
    time_limit: float | None = None,
    cancelled: Cancelled | None = None,
) -> ExecutorCut:
    """The best cut of layers for an executor that keeps its own order.

    Parameters
    ----------
    problem
        Layers. Its placement is ignored, because the executor has its own.
    virtual_stages
        Numbers of stages per rank to try; None tries those from 1 to :data:`MOST_CHUNKS`.
    group
        Megatron-LM's group size; None tries several.
    schedules
        Names of PyTorch's schedules to try; by default those with fused backwards.
    recompute
        Which stages may be recomputed. Executors cannot express ``per-stage``. None: as the executor offers;
        Megatron-LM also recomputes as many first layers of every stage.
    recompute_layers
        This number of transformer layers; None lets the search choose.
    time_limit, cancelled
        As in :func:`~zbv_models.fixed_orders.best_cut.best_cut`.

    Raises
    ------
    InvalidInput
        When the executor cannot run such a problem. Pointers are into the problem, or name a flag of
        ``zbv cut``: ``/virtual_stages``, ``/group_size``, ``/schedule`` or ``/recompute_layers``; empty if
        the numbers do not fit together.
    InfeasibleMemory
        When no cut fits the memory limit.
    """
    if executor not in EXECUTORS:
        raise InvalidInput.at("", f"found executor {executor!r}; must be one of {', '.join(EXECUTORS)}.")
    _check_request(executor, virtual_stages or (), group, schedules)
    modules = None if executor == "torch" else Modules.of(problem.model)
    if modules is not None:
        _check_modules(modules, executor, problem.pp_degree)
    offered = recomputation(problem, executor, modules, recompute, recompute_layers)
    tried = schedules_of(problem, executor, virtual_stages, group, schedules)
    plain = [each for each in tried if each.is_split]
    if plain and problem.model.can_recompute and recompute not in (None, "none", "uniform"):
        detail = f"found {recompute}, and {plain[0].name}; {REPEATED}"
        raise InvalidInput.at("/recompute", detail)
    names = problem.model.names
    letters_of = tuple(map(letter_of, names)) if modules is None else modules.letters
    even = {schedule: even_cut(executor, letters_of, schedule) for schedule in tried}
    best = best_cut(
        problem if modules is None else modules.kept_whole(problem),
        tried,
        recompute=offered,
        plain=plain,
        allow_empty=executor == "megatron",
        late=modules.late if modules is not None and executor == "megatron" else None,
        even={schedule: cut.bounds for schedule, cut in even.items()},
        effort=effort,
        seed=seed,
        time_limit=time_limit,
        cancelled=cancelled,
    )
    about_even = even[best.schedule].remark
    if modules is None:
        remark = "PyTorch's runtime has no settings of a cut."
        return ExecutorCut(executor, best, None, None, remark, about_even)
    stages = stage_letters(best.problem, modules)
    found, model = best.results[0], best.problem.model
    settings, remark = executor_settings(
        executor,
        stages,
        best.schedule,
        found.recompute,
        found.recompute_layers,
        () if model is None else model.model.recompute_modules,
    )
    return ExecutorCut(executor, best, stages, settings, remark, about_even)


def _check_request(
    executor: str, virtual_stages: Sequence[int], group: int | None, schedules: Sequence[str]
) -> None:
    """Raise :class:`InvalidInput` for a value that no problem allows; pointers name flags of ``zbv cut``."""
    for count in virtual_stages:
        if not 1 <= count <= MAX_CHUNKS:
            rule = "must be at least 1" if count < 1 else f"must be at most {MAX_CHUNKS}"
            raise InvalidInput.at("/virtual_stages", f"found {count} virtual stages; {rule}.")
    if group is not None:
        if executor != "megatron":
            detail = f"found it and executor {executor}; only megatron has group sizes. Leave it out."
            raise InvalidInput.at("/group_size", detail)
        if group < 1:
            raise InvalidInput.at("/group_size", f"found {group}; must be at least 1.")
        if virtual_stages and max(virtual_stages) == 1:
            detail = (
                f"found group size {group} with one virtual stage; only several take turns. Leave it out."
            )
            raise InvalidInput.at("/group_size", detail)
    if schedules and executor == "megatron":
        detail = (
            "found it and executor megatron, which has its own schedules; it is for torch and torchtitan. "
            "Leave it out."
        )
        raise InvalidInput.at("/schedule", detail)
    try:
        for name in schedules:
            torch_schedule_name(name)
    except InvalidInput as error:
        raise error.below("/schedule") from None


def _check_modules(modules: Modules, executor: str, pp_degree: int) -> None:
    """Raise :class:`InvalidInput` for layers that the executor cannot run, whatever the cut."""
    if executor == "torchtitan" and pp_degree > 1 and modules.late is not None:
        raise InvalidInput.at(
            "/layers",
            f"found {modules.late!r}, which belongs to multi-token prediction; torchtitan has none in "
            f"pipelines. Leave such layers out, or use another executor.",
        )


def recomputation(
    problem: LayeredProblem,
    executor: str,
    modules: Modules | None,
    asked: Recompute | None,
    layers: int | None = None,
) -> Recompute | First:
    """What the search may recompute; raises :class:`InvalidInput` if the executor cannot."""
    chosen, only = problem.model.recompute_modules, "only Megatron-LM does"
    is_megatron = executor == "megatron" and modules is not None
    is_offered = not chosen or executor == ("torchtitan" if "op" in chosen else "megatron")
    if not is_offered and asked not in (None, "none"):
        owner = "only torchtitan does" if "op" in chosen else only
        detail = f"found {', '.join(chosen)}; {owner} that. Use --recompute none."
        raise InvalidInput.at("/recompute_modules", detail)
    first = modules.first_blocks(problem) if is_megatron and modules is not None and not chosen else None
    if layers is None:
        return asked or (first or "uniform" if is_offered else "none")
    for is_kept, detail in (
        (is_megatron, f"found {layers} and executor {executor}; {only} that. Leave it out."),
        (
            asked is None,
            f"found {layers} and --recompute {asked}, which says what is recomputed. Leave out one.",
        ),
        (layers >= 1, f"found {layers}; must be at least 1."),
        (first, f"found {layers}; every transformer layer needs recompute, and no recompute_modules."),
    ):
        if not is_kept:
            raise InvalidInput.at("/recompute_layers", detail)
    return replace(first or First(), least=layers, most=layers)


def stage_letters(problem: Problem, modules: Modules) -> Stages:
    """The modules of every stage."""
    if problem.model is None:
        raise TypeError("the problem was not given by layers.")
    bounds = problem.model.cut.bounds
    return tuple(map(modules.of_stage, bounds[:-1], bounds[1:]))


def executor_settings(
    executor: str,
    stages: Stages,
    schedule: Schedule,
    recompute: str,
    recompute_layers: int | None = None,
    modules: Sequence[str] = (),
    flags: Sequence[str] = (),
    sizes: StepSizes | None = None,
    keys: Mapping[str, int | str] | None = None,
) -> tuple[str | None, str]:
    """The settings of an executor, or None and why there are none.

    Parameters
    ----------
    recompute, recompute_layers, modules
        As :func:`~zbv_models.fixed_orders.megatron_layout.recompute_flags` takes them.
    flags
        Further flags of Megatron-LM, which come first.
    sizes, keys
        Further settings of torchtitan.
    """
    ranks = schedule.placement.pp_degree
    if executor == "torch":
        return None, "PyTorch's runtime has no settings of a cut."
    try:
        if executor == "torchtitan":
            # Without a pipeline, torchtitan does not divide the model.
            parts = module_names(stages) if ranks > 1 else None
            if recompute == "all" and "op" in modules:
                recompute = "selective"
            titan = TitanSettings(
                ranks,
                schedule.name,
                schedule.microbatches,
                parts,
                recompute,
                schedule.is_split,
                sizes,
                keys or {},
            )
            return titan.text(), ""
        flags = [
            *flags,
            *layout_flags(stages, ranks, schedule.group),
            *recompute_flags(recompute, recompute_layers, modules),
        ]
        return " \\\n".join(flags) + "\n", ""
    except InvalidInput as error:
        return None, str(error.issues[0].detail)


def schedule_of_stages(
    problem: LayeredProblem, executor: str, chunks: int, group: int | None = None, names: Sequence[str] = ()
) -> Schedule:
    """The schedule that an executor runs with as many stages per rank, unless a group or a name is given.

    Raises :class:`InvalidInput` like :func:`cut_for_executor`.
    """
    _check_request(executor, (chunks,), group, names)
    p, m = problem.pp_degree, problem.microbatches
    if executor == "megatron":
        return megatron_schedule(p, m, chunks, group)
    if len(names) > 1:
        raise InvalidInput.at("/schedule", f"found {len(names)} names with a given cut; give one.")
    return torch_schedule(names[0] if names else TORCH_DEFAULTS[chunks > 1], p, m, chunks)


def executor_cut_json(cut: ExecutorCut) -> dict[str, Any]:
    """The result as a JSON document."""
    best = cut.best
    model = best.problem.model
    return {
        "executor": cut.executor,
        **best.results[0].document(),
        "objective": best.objective,
        "lower_bound": best.lower_bound,
        "status": "optimal" if best.is_optimal else "feasible",
        "shortest": {
            "objective": best.least,
            "partition": None if best.shortest.model is None else plain(best.shortest.model.partition),
            "layout": cut.shortest_layout,
        },
        "even_cut": plain(best.even),
        "even_cut_remark": cut.even_remark,
        "lower_bound_of_all_schedules": best.bound_of_all,
        "partition": None if model is None else plain(model.partition),
        "layers_per_stage": None if model is None else [len(stage) for stage in model.partition],
        "settings": cut.settings,
        "schedules": [
            {
                **each.document(),
                "objective": _number(each.objective),
                "lower_bound": _number(each.lower_bound),
                "searched": each.is_searched,
            }
            for each in best.results
        ],
        "refused": [
            {**schedule.document(), "reason": f"{issue.pointer}: {issue.detail}"}
            for schedule, issue in best.refused.items()
        ],
    }


def _number(value: float) -> float | None:
    """A number, or None instead of infinity, which JSON does not have."""
    return value if value < float("inf") else None


@dataclass(frozen=True)
class EvenCut:
    """An even division of the transformer layers; embedding, MTP layers and loss are at the ends."""

    bounds: tuple[int, ...]
    """(S+1,) boundaries as layer indices."""
    remark: str = ""
    """Which cut this is if the executor has none by itself; empty if it is the executor's own."""


def even_cut(executor: str, letters: Sequence[str], schedule: Schedule) -> EvenCut:
    """The cut of layers with these letters that an executor chooses by itself for a schedule."""
    blocks, stages = letters.count(DECODER), schedule.placement.n_stages
    if executor == "torchtitan" and stages <= blocks + 2:
        return EvenCut(_bounds(letters, _weighted(blocks, stages)))
    counts = dealt(blocks, stages)
    if blocks % stages and executor != "torch":
        fewer = "one less at both ends" if counts[0] < counts[1] else "fewer on the last stages"
        remark = (
            f"{EXECUTORS[executor]} by itself does not divide {blocks} transformer layers into {stages} "
            f"stages; the even cut here has {max(counts)} per stage and {fewer}."
        )
        return EvenCut(_bounds(letters, counts), remark)
    return EvenCut(_bounds(letters, counts))


def dealt(blocks: int, stages: int) -> list[int]:
    """Transformer layers of every stage: as many on each, if they divide.

    Otherwise, if two more would divide, embedding and loss count as one each, as with
    ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split`` of Megatron-LM;
    if not, the last stages have fewer, as with its ``--decoder-last-pipeline-num-layers``.
    """
    if blocks % stages and not (blocks + 2) % stages and stages > 1:
        each = (blocks + 2) // stages
        return [each - 1, *(each,) * (stages - 2), each - 1]
    each = -(-blocks // stages)
    return [max(0, min(each, blocks - stage * each)) for stage in range(stages)]


def _weighted(blocks: int, stages: int) -> list[int]:
    """torchtitan's rule: embedding and output count as one layer each, and the first stages have one more."""
    if stages == 1:
        return [blocks]
    each, more = divmod(blocks + 2, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _bounds(letters: Sequence[str], counts: Sequence[int]) -> tuple[int, ...]:
    begins = [at for at, letter in enumerate(letters) if letter == DECODER]
    behind = (
        at for at, letter in enumerate(letters) if letter in (MTP, LOSS) and at >= max(begins, default=0)
    )
    begins.append(next(behind, len(letters)))
    return (0, *(begins[done] for done in list(accumulate(counts))[:-1]), len(letters))
