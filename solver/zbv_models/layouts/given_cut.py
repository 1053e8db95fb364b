"""What a layout, all parts of which are chosen, achieves with a given cut under an executor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.search.options import Effort

from zbv_models.fixed_orders.score import Score, score_layout
from zbv_models.fixed_orders.user_layout import read_layout
from zbv_models.layouts.estimated_layout import EstimatedLayout, layers_on_ranks
from zbv_models.layouts.executor_memory import in_order
from zbv_models.layouts.executor_rules import NAMES, layouts_of_executors
from zbv_models.layouts.executor_settings import layout_settings
from zbv_models.layouts.layout import PARTS, Layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.setting import SECONDS


@dataclass(frozen=True, eq=False)
class GivenCut:
    """A layout with a given cut."""

    estimated: EstimatedLayout
    score: Score
    """Its memory is that of the executor's order, with all that the executor holds."""

    @property
    def step_time(self) -> float:
        """Seconds of a step, with what the busiest rank does once."""
        once = self.estimated.once(layers_on_ranks(self.score.problem))
        return self.score.objective * SECONDS + once

    @property
    def peak_memory(self) -> float:
        """Bytes of the tensors on the fullest device, with ``reserve``."""
        return max(self.score.timing.peak_memory)

    @property
    def reserved_memory(self) -> float:
        """Bytes that PyTorch's allocator reserves for them, with ``reserve``."""
        return self.estimated.setting.cluster.groups[0].reserved(self.peak_memory)


def score_given_cut(
    request: Request, text: str, *, effort: Effort = "quick", time_limit: float | None = None
) -> GivenCut:
    """Time a layout with a given cut, and compare the cut with the best ones.

    Parameters
    ----------
    text
        As ``zbv cut --layout`` takes it (:mod:`zbv_models.fixed_orders.user_layout`).
    effort, time_limit
        Of the search of better cuts.

    Raises
    ------
    InvalidInput
        When several layouts have the fixed parts, the executor cannot run the layout, or it does not take
        the cut.
    """
    executor = request.executor
    if executor not in NAMES:
        detail = (
            f"found a cut and executor {executor}. Name an executor with a fixed order: {', '.join(NAMES)}."
        )
        raise InvalidInput.at("--cut", detail)
    candidates = layouts_of_executors(executor, request.setting, request.layouts)
    layouts = [layout for _, layout in candidates]
    if len(layouts) > 1:
        raise InvalidInput.at("--cut", _open_parts(layouts))
    (layout,) = layouts
    setting = request.setting.of_executor(executor)
    if layout.recompute == "selective":
        layout = replace(layout, recompute_modules=setting.modules_of(executor)[0])
    estimated = EstimatedLayout.of(layout, setting)
    try:
        modules = Modules.of(estimated.problem.model)
        stages = read_layout(text, modules, layout.pipeline_parallel).n_stages
        problem = estimated.with_buffers(executor, max(1, stages // layout.pipeline_parallel))
        score = score_layout(problem, executor, text, effort=effort, time_limit=time_limit)
    except InvalidInput as error:
        raise InvalidInput.at("--cut", str(error.issues[0].detail)) from None
    settings, remark = layout_settings(executor, layout, setting, score.stages, score.schedule)
    held = in_order(score.problem, score.orders, estimated.passing)
    return GivenCut(estimated, replace(score, problem=held, settings=settings, remark=remark))


def _open_parts(layouts: list[Layout]) -> str:
    """The parts in which layouts differ."""
    differing = [name for name in (*PARTS, "recompute") if len({getattr(each, name) for each in layouts}) > 1]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
    return f"found {len(layouts):,} layouts, and a cut is that of one. Fix {flags}."
