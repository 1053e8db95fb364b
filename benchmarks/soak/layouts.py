"""Layouts of tiny models on tiny clusters: the search compared with planning every layout.

Bounds and steps are those of the library, because the model of costs has no second implementation. Checked
is what the search adds: that its bounds are bounds, and that it skips no better layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import inf, isclose
from random import Random
from typing import Any

from zbv_models.fixed_orders.regular_cut import TOLERANCE
from zbv_models.layouts.cluster import parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, plan_layout
from zbv_models.layouts.executor_rules import FREE, NAMES, layouts_of_executors, runs_layout
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.scheduled_layout import ScheduledLayout, ScheduledLayouts
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.setting import Setting
from zbv_solver.errors import InfeasibleMemory, InvalidInput, NoLayoutFits
from zbv_solver.problem.numeric import OPTIMAL_GAP

from benchmarks.soak.checks import Coverage

Document = dict[str, Any]
MOST_LAYOUTS = 60
"""Of a drawn request, because all of them are planned."""
MOST_EXECUTOR_LAYOUTS = 6
"""As above; a cut for every schedule of an executor takes far longer."""
EXECUTOR_SHARE = 0.3


def draw_layouts(chance: Random) -> tuple[str, Document]:
    """Return a request with few layouts, and its kind for the summary."""
    executor = chance.choice(list(NAMES)) if chance.random() < EXECUTOR_SHARE else FREE
    while True:
        document = _request(chance, executor)
        try:
            count = len(_parsed(document).layouts)
        except InvalidInput:  # nothing divides, or no layer has the modules of selective recomputation
            continue
        if count <= (MOST_LAYOUTS if executor == FREE else MOST_EXECUTOR_LAYOUTS):
            kind = "mixed " if len(document["cluster"]["groups"]) > 1 else ""
            return f"{kind}layouts, {executor}", document


def _request(chance: Random, executor: str) -> Document:
    is_free = executor == FREE
    fixed: Document = {"microbatch_size": chance.choice((1, 2))}
    for name, values in (
        ("zero_stage", (0, 1, 3)),
        ("tensor_parallel", (1, 2)),
        ("recompute", ("none", "full", "per-stage", "selective")),
        ("placement", ("tp-cp-dp-pp", "tp-cp-pp-dp")),
    ):
        if chance.random() < (0.4 if is_free else 0.8):
            fixed[name] = chance.choice(values)
    groups = 1 if not is_free or chance.random() < 0.5 else chance.choice((2, 2, 3))
    # Updates take hardly any time for executors, because a cut's search does not know them.
    speed = 1.0 if is_free else 1e5
    cluster: Document = {"groups": [_group(chance, speed) for _ in range(groups)]}
    link = {"latency": chance.choice((0, 20, 500)), "bandwidth": speed * chance.choice((1, 25, 100))}
    cluster["links"] = {"between_nodes": link}
    return {
        "model": _model(chance),
        "global_batch": chance.choice((2, 4, 6, 12)),
        "cluster": cluster,
        "fixed": fixed,
        "executor": executor,
        "top": chance.choice((1, 1, 2, 5)),
    }


def _group(chance: Random, speed: float) -> Document:
    flops = chance.choice((50, 120, 300))
    return {
        "nodes": chance.choice((1, 1, 2)),
        "gpus_per_node": chance.choice((1, 1, 2, 3)),
        "device": {"achieved_tflops": flops, "memory_bandwidth": speed * chance.choice((500, 1500))},
        "memory": round(1e9 * 2 ** chance.uniform(-1, 6)),
        "reserve": chance.choice((0, 0, 100_000_000)),
        "links": {
            "in_node": {"latency": chance.choice((0, 10)), "bandwidth": speed * chance.choice((30, 300))}
        },
    }


def _model(chance: Random) -> Document:
    model: Document = {
        **{"hidden": chance.choice((256, 1024)), "layers": chance.randint(1, 7), "heads": 8},
        **{"kv_heads": chance.choice((2, 8)), "vocabulary": chance.choice((512, 32_000))},
        **{"sequence": chance.choice((256, 2048)), "tied_embeddings": chance.random() < 0.4},
        **{"gated": chance.random() < 0.5, "prediction_layers": chance.choice((0, 0, 0, 1))},
    }
    if chance.random() < 0.4:
        model |= {"experts": chance.choice((2, 4)), "experts_per_token": chance.choice((1, 2))}
    return model


def _parsed(document: Document) -> Request:
    cluster = document["cluster"]
    if len(cluster["groups"]) == 1:
        (nodes,) = cluster["groups"]
        links = {**cluster["links"], **nodes["links"]}
        cluster = {**nodes, "links": links}
    model = {"model": document["model"], "global_batch": document["global_batch"]}
    return parse_request(model, parse_cluster(cluster), Fixed(**document["fixed"]))


def check_layouts(kind: str, document: Document, coverage: Coverage) -> None:
    """Plan every layout, and compare with the search.

    Raises :class:`Contradiction` at the first contradiction.
    """
    request, executor, top = _parsed(document), document["executor"], document["top"]
    coverage.problems[kind] += 1
    is_free = executor == FREE
    if not is_free:
        try:
            layouts_of_executors(executor, request.setting, request.layouts)
        except InvalidInput:
            coverage.checks["layouts: refused"] += 1
            return
    try:
        steps = sorted((_every_step if is_free else _every_executor_step)(request, executor, coverage))
        if is_free:
            found = best_layouts(request.layouts, request.setting, top)
        else:
            found = executor_layouts(request.layouts, request.setting, executor, top)
    except NoLayoutFits:
        coverage.require(not steps, "layouts: none fits", lambda: f"but one takes {steps[0]!r} s")
        return
    coverage.require(bool(steps), "layouts: one fits", lambda: "but none could be planned")
    coverage.exact[kind] += 1
    _compare(kind, found, steps[:top], coverage)
    shown = [each.step_time for each in found.best]
    coverage.require(
        len(shown) == len(steps[:top]) and _are_short(shown, steps, request, executor),
        "layouts: best first",
        lambda: f"lists {shown}; planning every layout gives {steps[:top]}",
    )


def _are_short(shown: list[float], steps: list[float], request: Request, executor: str) -> bool:
    """Whether the steps of a list are those of planning every layout.

    Those of executors may be shorter, or a little longer: regular cuts are preferred, and the search of cuts
    does not know what a rank does once per step.
    """
    if executor == FREE:
        return all(isclose(*pair, rel_tol=1e-12) for pair in zip(shown, steps, strict=False))
    once, setting = 0.0, request.setting.of_executor(executor)
    for layout in request.layouts:
        estimated = EstimatedLayout.of(layout, setting)
        every = tuple(name for layer in estimated.estimate.layers for name in layer.names)
        once = max(once, estimated.once([every] + [()] * (layout.pipeline_parallel - 1)))
    return all(step <= best * (1 + TOLERANCE) + once for step, best in zip(shown, steps, strict=False))


def _compare(kind: str, found: Ranking, steps: list[float], coverage: Coverage) -> None:
    least, below = steps[0], found.no_layout_below
    coverage.require(
        below <= least * (1 + OPTIMAL_GAP),
        "layouts: no layout below",
        lambda: f"states {below!r} s; a layout takes {least!r} s",
    )
    coverage.require(
        all(each.lower_bound <= each.step_time * (1 + OPTIMAL_GAP) for each in found.best),
        "layouts: own bound",
        lambda: f"{[(each.lower_bound, each.step_time) for each in found.best]}",
    )
    at = kind.split(",")[0], kind.split(", ")[1]
    coverage.gaps[at] = max(coverage.gaps.get(at, 0.0), least / below - 1)


def _every_step(request: Request, _executor: str, coverage: Coverage) -> Iterator[float]:
    """The step of every layout that fits, in free orders."""
    for layout in request.layouts:
        estimated = EstimatedLayout.of(layout, request.setting)
        try:
            planned = plan_layout(estimated)
        except InfeasibleMemory:
            continue
        _check_bounds(estimated, request.setting, planned.step_time, coverage)
        yield planned.step_time


def _every_executor_step(request: Request, executor: str, coverage: Coverage) -> Iterator[float]:
    """The step of every layout that an executor runs: every choice of it, searched in full."""
    setting = replace(request.setting, has_loops=True)
    for layout in request.layouts:
        if runs_layout(executor, setting.model, layout):
            source = ScheduledLayouts(setting, "quick")
            estimates = source.estimated(executor, layout)
            orders = chain.from_iterable(source.scheduled(executor, each) for each in estimates)
            steps = [step for each in orders if (step := _searched_step(each, coverage)) < inf]
            yield from sorted(steps)[:1]


def _searched_step(scheduled: ScheduledLayout, coverage: Coverage) -> float:
    """The step of a layout under one schedule; inf if no cut fits."""
    scheduled.bound_loads()
    scheduled.bound_paths(inf)
    scheduled.finish(inf)
    estimated, step = scheduled.estimated, scheduled.step_time
    if step < inf:
        _check_bounds(estimated, estimated.setting, step, coverage)
    return step


def _check_bounds(estimated: EstimatedLayout, setting: Setting, step: float, coverage: Coverage) -> None:
    """Every bound that may rule a layout out is at most its step."""
    coverage.require(
        estimated.has_room_for_states, "layouts: room for states", lambda: f"of {estimated.layout} lacks"
    )
    for name, bound in (
        ("least work", setting.least_work(estimated.layout)),
        ("mean", estimated.mean_bound),
        ("memory", estimated.memory_bound),
        ("load", estimated.load_bound),
    ):
        coverage.require(
            bound <= step * (1 + OPTIMAL_GAP),
            f"layouts: bound of {name}",
            lambda name=name, bound=bound: f"of {estimated.layout} is {bound!r} s; it takes {step!r} s",  # type: ignore[misc]
        )
