"""The best of all layouts: time, share that bounds rule out, and comparison with planning all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

from zbv_models.layouts.cluster import parse_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.request import Request, parse_request
from zbv_models.layouts.search import best_layouts, plan_layout
from zbv_solver.commands.cli import useful_workers
from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.problem.numeric import OPTIMAL_GAP

from benchmarks.findings import Finding, at_least, at_most

MOST_SECONDS = 15.0
LEAST_PRUNED_PERCENT = 90.0
LARGE = ("llama-3.1-70b", 16, 1024)
"""A model, the nodes of 8 H100 that train it, and sequences per step."""
MOST_LAYOUTS = 400
"""Of a random case, because all of them are planned."""
MIXED_SHARE = 0.4
"""Of random cases: those with a second group of nodes."""


def layouts_table(cases: int, seed: int, write: Callable[[str], object]) -> list[Finding]:
    """Search the layouts of a large cluster, then compare random small ones with full enumeration."""
    name, nodes, batch = LARGE
    cluster = parse_cluster({"nodes": nodes, "gpus_per_node": 8, "device": "h100"})
    request = parse_request({"presets": [name], "global_batch": batch}, cluster)
    began = time.perf_counter()
    workers = useful_workers()
    found = best_layouts(request.layouts, request.setting, workers=workers, processes=workers)
    seconds = time.perf_counter() - began
    best = found.best[0]
    write(f"{name}, {cluster.devices} devices: {best.layout}\n")
    write(f"  step {best.step_time:.4g} s, no layout below {found.no_layout_below:.4g} s\n")
    random, wrong = Random(seed), 0
    for case in range(cases):
        request = _random_request(random)
        least, planned = _least_of_all(request)
        try:
            ranking = best_layouts(request.layouts, request.setting)
        except NoLayoutFits:
            wrong += planned > 0
            write(f"case {case}: {len(request.layouts)} layouts, none fits\n")
            continue
        step = ranking.best[0].step_time
        is_right = abs(step - least) <= OPTIMAL_GAP * least
        wrong += not is_right
        share = ranking.pruned / ranking.considered
        about = f"{ranking.considered} layouts, {planned} fit, {share:.0%} ruled out"
        write(f"case {case}: {about}, {step:.4g} s\n")
    return [
        Finding("seconds, all layouts", seconds, "s", at_most(MOST_SECONDS)),
        Finding(
            "  layouts ruled out", 100 * found.pruned / found.considered, "%", at_least(LEAST_PRUNED_PERCENT)
        ),
        Finding(f"of {cases} random cases, not the best of all", wrong, "", at_most(0)),
    ]


def _least_of_all(request: Request) -> tuple[float, int]:
    """The shortest step of all layouts, each of them planned, and how many fit."""
    steps = []
    for layout in request.layouts:
        estimated = EstimatedLayout.of(layout, request.setting)
        try:
            steps.append(plan_layout(estimated).step_time)
        except InfeasibleMemory:
            continue
    return min(steps, default=float("inf")), len(steps)


def _random_request(random: Random) -> Request:
    """A small model on a small cluster, perhaps of two groups, with few enough layouts to plan all."""
    while True:
        nodes, gpus = random.choice([(1, 2), (1, 4), (2, 2), (2, 4), (3, 2), (6, 1)])
        devices = nodes * gpus
        groups = [_random_nodes(random, nodes, gpus)]
        if random.random() < MIXED_SHARE:
            nodes, gpus = random.choice([(1, 1), (1, 2), (2, 1)])
            groups.append(_random_nodes(random, nodes, gpus))
            devices += nodes * gpus
        cluster = parse_cluster({"groups": groups} if len(groups) > 1 else groups[0])
        request = parse_request({"model": _random_model(random), "global_batch": 2 * devices}, cluster)
        if len(request.layouts) <= MOST_LAYOUTS:
            return request


def _random_nodes(random: Random, nodes: int, gpus: int) -> dict[str, Any]:
    device, memory = random.choice(["h100", "a100"]), random.choice([2e9, 4e9, 8e9, 16e9, 80e9])
    return {"nodes": nodes, "gpus_per_node": gpus, "device": device, "memory": memory}


def _random_model(random: Random) -> dict[str, Any]:
    model: dict[str, Any] = {
        **{"hidden": random.choice([512, 1024, 2048]), "layers": random.randint(3, 9), "heads": 8},
        **{"kv_heads": random.choice([2, 8]), "vocabulary": random.choice([8192, 65_536])},
        **{"sequence": random.choice([512, 2048]), "tied_embeddings": random.random() < 0.5},
    }
    if random.random() < 0.3:
        model |= {"experts": 4, "experts_per_token": 2}
    return model
