"""Measured layers in the place of estimates: what is replaced, what is scaled, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.executor_layouts import Document
from support.executor_layouts import cluster_of as equal_cluster_of
from support.executor_layouts import request_of as asked
from support.measured_profiles import MEASURED_MODEL as MODEL
from support.measured_profiles import PROGRAM, as_estimated
from support.rankings import check_ranking
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.replica import Running
from zbv_models.layouts.answer import costs_of, ranking_json
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.measured_layers import Origin, Origins
from zbv_models.layouts.profile import parse_profile
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.setting import Setting
from zbv_solver.errors import InvalidInput


def cluster_of(nodes: int = 1) -> Cluster:
    return equal_cluster_of(nodes, 4 // nodes, kernel_latency=6)


def request_of(*profiles: Document, cluster: Cluster | None = None, **fixed: Any) -> Request:
    found = asked(MODEL, cluster or cluster_of(), **fixed)
    parsed = tuple(parse_profile(each, f"profile-{at}.json") for at, each in enumerate(profiles))
    return replace(found, profiles=parsed)


def block_of(layout: Layout, setting: Setting) -> LayerEstimate:
    return EstimatedLayout.of(layout, setting).estimate.layers[1]


def costs_and_bytes(of: Running | None) -> list[float] | None:
    return None if of is None else [*vars(of.times).values(), of.after_forward, of.after_input, of.workspace]


@pytest.mark.parametrize(("size", "tensor"), [(1, 1), (2, 2)])
def test_a_profile_that_equals_the_estimate_changes_nothing(size: int, tensor: int) -> None:
    plain, measured = request_of().setting, request_of(as_estimated(size, tensor)).setting
    seen = set()
    for layout in request_of().layouts:
        expected, found = (EstimatedLayout.of(layout, setting) for setting in (plain, measured))
        for one, other in zip(found.estimate.layers, expected.estimate.layers, strict=True):
            for running, by in ((one.plain, other.plain), (one.full, other.full)):
                assert costs_and_bytes(running) == (by and pytest.approx(costs_and_bytes(by), rel=1e-9))
            assert one.static.total == pytest.approx(other.static.total, abs=2)
            assert one.step.total == pytest.approx(other.step.total, rel=1e-9)
            assert one.output_bytes == other.output_bytes
        assert measured.least_work(layout) == pytest.approx(plain.least_work(layout), rel=1e-9)
        seen |= {origins.plain for origins in found.origins}
    assert seen == {"measured", "scaled"}


def test_layers_are_measured_scaled_or_estimated() -> None:
    document = as_estimated(size=2, factor=3.0)
    document["layers"] = [layer for layer in document["layers"] if layer["name"] == "block"]
    (given,) = document["layers"]
    given["backward"] = 5.0
    del given["recompute"]
    plain, measured = request_of().setting, request_of(document).setting
    layouts = request_of(tensor_parallel=1, pipeline_parallel=4).layouts
    origins: list[Origin] = ["measured", "scaled"]
    for layout, origin in zip(layouts[1:3], origins, strict=True):
        found, expected = EstimatedLayout.of(layout, measured), EstimatedLayout.of(layout, plain)
        assert found.origins == (Origins(), Origins(origin, "scaled"), Origins())
        block, estimated = found.estimate.layers[1], expected.estimate.layers[1]
        assert vars(block.plain.times) == pytest.approx(vars(estimated.plain.times.scaled(3.0)))
        assert block.full is not None
        repeated = block.full.times.backward_input - block.plain.times.backward_input
        assert repeated == pytest.approx(3.0 * estimated.plain.times.forward)
        assert found.estimate.layers[0] == expected.estimate.layers[0]
        share = given["backward"] / (given["backward_input"] + given["backward_weight"])
        both = block.plain.times.backward_input + block.plain.times.backward_weight
        assert block.plain.fused == pytest.approx(share * both)
    # The nearest profile counts, and of two the smaller one.
    two = request_of(as_estimated(4, factor=4.0), as_estimated(1, factor=2.0)).setting
    for layout in layouts:
        factor = 2.0 if layout.microbatch_size <= 2 else 4.0
        forward = block_of(layout, plain).plain.times.forward
        assert block_of(layout, two).plain.times.forward == pytest.approx(factor * forward)


def test_exchanges_between_replicas_are_added_to_measured_layers() -> None:
    setting = request_of(as_estimated(1, factor=0.5)).setting
    layout = Layout(1, 1, 1, 2, 2, 1, 4, 3, "per-stage", "tp-cp-dp-pp")
    shared, whole = (block_of(each, setting) for each in (layout, replace(layout, zero_stage=0)))
    assert shared.plain.times.forward > whole.plain.times.forward
    assert shared.plain.workspace > whole.plain.workspace
    assert shared.static.total < whole.static.total


def test_measured_links_replace_those_of_nodes() -> None:
    document = as_estimated()
    document["costs"] = {"link": {"latency": 7.0, "bandwidth": 4000.0}}
    for name, ranks, latency, rate in (
        ("all_reduce", 2, 90.0, 1000.0), ("all_reduce", 4, 90.0, 500.0), ("scatter_gather", 2, 80.0, 700.0),
    ):  # fmt: skip
        rings = document["profile"].setdefault(name, [])
        rings.append({"ranks": ranks, "latency": latency, "bandwidth": rate})
    layout = Layout(1, 1, 1, 4, 1, 1, 2, 0, "per-stage", "tp-cp-dp-pp")
    half = replace(layout, pipeline_parallel=2, data_parallel=2)
    one, two = (request_of(document, cluster=cluster_of(nodes)).setting for nodes in (1, 2))

    def data(setting: Any, of: Layout) -> tuple[float, float, float]:
        links, latency = setting.links(of)
        return links.data.bandwidth, links.data.latency, latency

    assert [data(one, layout), data(two, half)] == [(0.5, 0.0, 90.0), (1.0, 0.0, 90.0)]
    assert data(two, replace(half, zero_stage=1)) == (0.7, 0.0, 80.0)
    assert data(two, layout)[0] == 50, "over both nodes"
    near, far = one.links(half)[0].pipeline, two.links(half)[0].pipeline
    assert (near.bandwidth, near.latency, far.bandwidth) == (4.0, 7.0, 25)
    names = [("embedding", *(f"block.{k}" for k in range(4)), "head")]
    measured, plain = (EstimatedLayout.of(layout, each) for each in (one, replace(one, measured=None)))
    assert measured.latency == 90.0
    assert measured.once(names) > plain.once(names)


def test_bounds_hold_for_measured_layers() -> None:
    document = as_estimated(2, factor=0.2)
    for layer in document["layers"]:
        layer["backward"] = 0.6 * (layer["backward_input"] + layer["backward_weight"])
    fixed: Document = {"tensor_parallel": 1, "context_parallel": 1, "zero_stage": 0}
    request = request_of(document, **fixed, placement="tp-cp-dp-pp")
    check_ranking(request)
    ranking = best_layouts(request.layouts, request.setting)
    costs = ranking_json(ranking, request)["layouts"][0]["costs"]
    assert costs == costs_of(ranking.best[0])
    assert sum(sum(kinds.values()) for kinds in costs.values()) == 6
    # Selective recomputation is scaled, because profiles measure the full one.
    fixed = {"recompute": "selective", "tensor_parallel": 1, "microbatch_size": 1}
    some = asked(MODEL, cluster_of(), parallel={"recompute_modules": ["mlp"]}, **fixed)
    some = replace(some, profiles=(parse_profile(document, "profile.json"),))
    costs = costs_of(best_layouts(some.layouts, some.setting).best[0])
    assert costs["scaled"]["block (recomputed)"] > 0
    assert not any(name.startswith("block") for name in costs["measured"])


def test_profiles_must_fit_the_model_the_device_and_each_other() -> None:
    first = as_estimated()
    first["layers"][1]["name"] = "mlp"
    first["measured"] = {**PROGRAM, "precision": "float32"}
    second = {**as_estimated(), "measured": {**PROGRAM, "torch": "2.9", "device": "A100"}}
    with pytest.raises(InvalidInput) as error:
        _ = request_of(first, second, cluster=replace(cluster_of(), preset="h200")).setting
    both = {"/measured/precision", "/measured/device"}
    for number, pointers in enumerate((both | {"/layers/1/name"}, both | {"/profile"})):
        issues = [issue for issue in error.value.issues if issue.source == f"profile-{number}.json"]
        assert {issue.pointer for issue in issues} == pointers
    for preset in ("h100-80gb", "h100"):
        assert request_of(as_estimated(), cluster=replace(cluster_of(), preset=preset)).setting.measured
    with pytest.raises(InvalidInput, match="H100"):
        _ = request_of(as_estimated(), cluster=replace(cluster_of(), preset="a100")).setting
