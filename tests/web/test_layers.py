"""A problem with layers in a browser: from a file to the search and to the cut of the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page
from support.layered import LAYERED, NAMES, RECOMPUTED
from zbv_solver.problem.writing import problem_json

from web.browsing import Look, Service

READY = "Ready to search."


@pytest.fixture(scope="module")
def shared(look: Callable[..., Look], service: Service) -> Iterator[Look]:
    found = look(service.url, has_clock=True)
    yield found
    assert found.complaints == []
    assert found.strangers() == []


def begin(shared: Look, document: dict[str, Any], name: str = "layers.json") -> Page:
    """The form with a file in it."""
    page = shared.page
    page.goto(f"{shared.origin}/new")
    content = json.dumps(document).encode()
    page.set_input_files("#file", {"name": name, "mimeType": "application/json", "buffer": content})
    page.locator("#note").filter(has_text=name).wait_for()
    return page


def says(look: Look, text: str) -> None:
    look.soon(look.page.locator('#verdict[aria-busy="false"]').filter(has_text=text))


def shown(page: Page) -> dict[str, Any]:
    """The problem that the page shows as JSON."""
    found: dict[str, Any] = json.loads(page.locator("#json").inner_text())
    return found


def test_a_file_of_layers_leads_to_the_plan_that_cuts_them(shared: Look) -> None:
    page = begin(shared, LAYERED)
    says(shared, READY)
    assert page.locator("#layers-panel").is_visible()
    assert not page.locator("#costs-panel").is_visible()
    rows = page.locator("#table-layers tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["embedding", "block × 6", "head"]
    said = page.locator("#layers-said").inner_text()
    assert "Transfers have a latency of 1 µs and a bandwidth of 100 B per µs." in said
    assert "embedding, block.0 stay together" in said
    shared.soon(page.locator("#bars", has_text="Histogram cut"))

    # Amounts have the unit of the form; those in files from `zbv estimate` are bytes.
    table = page.locator("#table-layers")
    assert "5 MiB" in table.inner_text()
    page.fill("#memory_unit", "bytes")
    assert "5 B" in table.inner_text()
    page.fill("#memory_unit", "MiB")
    # The reader may change everything except the layers.
    page.fill("#microbatches", "6")
    page.select_option("#placement", "auto")
    page.select_option("#limit_kind", "amount")
    page.fill('[id="memory.limit-0"]', "60")
    page.select_option("#effort", "quick")
    says(shared, READY)
    assert "one stage per rank" in page.locator("#facts").inner_text()
    shared.soon(page.locator("#bars:not(.stale) .own"))
    assert "504" not in page.locator("#bars .own").inner_text()  # which is what four microbatches take
    shared.keep("new-search-of-layers")
    asked = shown(page)
    assert (asked["microbatches"], asked["placement"], asked["memory"]["limit"]) == (6, "auto", 60)
    assert (asked["layers"], asked["costs"], asked["cut"]) == (
        LAYERED["layers"],
        LAYERED["costs"],
        LAYERED["cut"],
    )
    page.click("#submit")

    page.wait_for_url(f"{shared.origin}/searches/*")
    assert "divide 8 layers into stages" in page.locator(".sub").inner_text()
    page.locator("#to-plan").wait_for()
    asked_of = page.locator('section[aria-labelledby="asked"]').inner_text()
    assert "the best of V, interleaved × 2, interleaved × 3, one stage per rank" in asked_of
    assert "block × 6" in asked_of
    shared.keep("search-of-layers")
    page.click("#to-plan")
    page.wait_for_selector('#chart[data-state="ready"]')
    layers = page.locator('section[aria-labelledby="layers"]')
    text = layers.inner_text()
    assert "other cut" in text
    assert all(name in text for name in ("embedding", "head"))
    assert layers.locator("tbody tr").count() == 2
    assert "histogram-cut" in page.locator('section[aria-labelledby="baselines"]').inner_text()
    shared.keep("plan-of-layers")

    page.get_by_role("link", name="Compare", exact=True).click()
    page.wait_for_selector("#numbers")
    numbers = page.locator('section[aria-labelledby="numbers"]').inner_text()
    assert all(name in numbers for name in ("1f1b", "even-cut", "histogram-cut"))

    page.get_by_role("link", name="Memory and time").click()
    page.wait_for_selector(".plot path.own")
    assert "Every limit has its own division into stages" in page.locator(".sub").inner_text()
    assert "[MiB]" in page.locator(".below-axis").inner_text()
    assert page.get_by_role("button", name="missing points").is_visible()
    head = page.locator('section[aria-labelledby="limits"] thead').inner_text()
    assert "Cut" in head
    assert "Per rank" not in head
    shared.keep("frontier-of-layers")


def test_a_plan_leads_back_to_its_layers_and_a_cut_of_a_file_can_be_kept(
    shared: Look, service: Service
) -> None:
    partition = [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]]
    page = begin(shared, {**RECOMPUTED, "partition": partition, "recompute": [False, True, True, False]})
    says(shared, READY)
    assert shown(page)["partition"] == partition
    assert "holds 0.2" in page.locator("#table-layers").inner_text()
    page.uncheck("#keep_cut")
    says(shared, READY)
    assert "partition" not in shown(page)
    assert "recompute" not in shown(page)
    page.check("#keep_cut")
    page.fill("#pp_degree", "3")
    says(shared, "/problem/partition")  # which has the stages of two ranks

    # What stages cost follows from the layers; transfers that were measured are their mean elsewhere.
    measured = {**RECOMPUTED, "costs": {"p2p": [1, 2, 6]}, "partition": partition, "recompute": [False] * 4}
    page = begin(shared, {**measured, "memory": {}}, "measured.json")
    says(shared, READY)
    assert shown(page)["costs"] == {"p2p": [1, 2, 6]}
    page.uncheck("#keep_cut")
    says(shared, READY)
    assert shown(page)["costs"] == {"p2p": 3}

    plan = service.search({**LAYERED, "microbatches": 5, "placement": "auto"})
    page = begin(shared, problem_json(plan.problem), "of-a-plan.json")
    says(shared, READY)
    page.uncheck("#keep_cut")
    says(shared, READY)
    assert shown(page)["costs"] == LAYERED["costs"]
    page.goto(f"{shared.origin}/new?from={plan.plan_id}")
    says(shared, READY)
    asked = shown(page)
    assert "partition" not in asked
    assert [layer["name"] for layer in asked["layers"]] == ["embedding", "block", "head"]
    assert (asked["costs"], asked["placement"]) == (LAYERED["costs"], "auto")
    page.select_option("#preset", "equal-stages")
    says(shared, READY)
    assert page.locator("#costs-panel").is_visible()
    assert "layers" not in shown(page)


def test_long_layer_names_wrap_and_are_escaped(shared: Look, service: Service) -> None:
    name = "<i>transformer." + "encoder_and_decoder." * 8
    layers = [{**LAYERED["layers"][0], "name": name}, *LAYERED["layers"][1:]]
    plan = service.search({**LAYERED, "layers": layers, "cut": {}})
    shared.open(f"{shared.origin}/plans/{plan.plan_id}")
    page = shared.page
    table = page.locator('section[aria-labelledby="layers"] .scroll')
    assert name in table.inner_text()
    assert table.evaluate("(it) => it.scrollWidth <= it.clientWidth")


def test_a_wrong_layer_is_reported_and_its_text_is_shown_unchanged(shared: Look) -> None:
    wrong = [{**LAYERED["layers"][0], "forward": "<b>a lot</b>"}, *LAYERED["layers"][1:]]
    page = begin(shared, {**LAYERED, "layers": wrong})
    says(shared, "/problem/layers/0/forward")
    assert "<b>a lot</b>" in page.locator("#table-layers").inner_text()
    page.click("#submit")
    page.locator("#summary").filter(has_text="/problem/layers/0/forward").wait_for()

    many = [{"name": f"layer {place}"} for place in range(500)]
    page = begin(shared, {**LAYERED, "layers": many, "cut": {}}, "many.json")
    says(shared, "100 errors to correct.")  # the service tells no more
    assert "/problem/layers/2/forward" in page.locator("#verdict").inner_text()
    assert page.locator("#verdict").inner_text().endswith("And 92 more.")
    assert "/problem/layers/3/" not in page.locator("#verdict").inner_text()
    many = [{"name": f"layer {place}"} for place in range(600)]
    page = begin(shared, {**LAYERED, "layers": many, "cut": {}}, "more.json")
    says(shared, "/problem/layers")
    assert page.locator("#table-layers tbody tr").count() == 513
    assert page.locator("#table-layers tbody tr").last.inner_text() == "and 88 more"
