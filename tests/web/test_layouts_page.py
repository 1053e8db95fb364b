"""Searches for layouts in a browser: the form, its mistakes, the result, and all of it without scripts."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from web.browsing import Look, Service

MODEL = {"model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1024, "sequence": 512}}
ENDS = 120_000
"""Milliseconds for a search on a busy machine."""


def fill(found: Look, url: str, batch: str) -> None:
    """The form for a small model on one node of two devices."""
    page = found.page
    found.open(f"{url}/layouts")
    page.get_by_text("Own model", exact=True).click()
    page.locator("#model_json").fill(json.dumps(MODEL))
    page.get_by_label("Nodes", exact=True).fill("1")
    page.get_by_label("Devices per node").fill("2")
    page.get_by_label("Global batch").fill(batch)
    page.get_by_text("Fix parts of the layout").click()
    page.get_by_label("Microbatch size").fill("1")


def test_the_form_leads_to_the_best_layouts_and_their_plans(
    look: Callable[..., Look], service: Service
) -> None:
    found = look(service.url)
    page = found.page
    fill(found, service.url, "8")
    page.get_by_role("button", name="Search layouts").click()
    page.wait_for_url("**/layouts/*")
    expect(page.locator("#ranking")).to_be_visible(timeout=ENDS)
    expect(page.locator(".verdict")).to_contain_text("No layout has a step below")
    rows = page.locator("[aria-labelledby=ranking] tbody tr")
    expect(rows).to_have_count(5)
    expect(page.locator(".plot a")).to_have_count(5)
    expect(page.locator(".plot circle.best")).to_have_count(1)
    expect(page.locator(".parts-bar rect").first).to_be_visible()
    expect(page.locator("[aria-labelledby=sensitivity] tbody tr")).to_have_count(8)
    found.keep("layouts-light")
    with page.expect_response("**/layouts.json") as answered:
        page.get_by_role("link", name="JSON").click()
    document = answered.value.json()
    best = document["answer"]["layouts"][0]
    page.wait_for_url("**/layouts.json")
    page.go_back()
    expect(rows.first).to_contain_text(f"{best['reserved_memory'] / 1e9:.3g} GB")
    expect(page.get_by_text("2, 80 GB each")).to_be_visible()  # the size of an H100, not the room for tensors
    page.locator(".plot a circle.best").click()
    page.wait_for_url(f"**/plans/{best['plan_id']}")
    assert found.complaints == []
    assert found.strangers() == []


def test_mistakes_come_back_with_the_form(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url, java_script_enabled=False)
    page = found.page
    fill(found, service.url, "8")
    page.locator("#model_json").fill('{"model": {"hidden": -1}}')
    page.get_by_role("button", name="Search layouts").click()
    expect(page.get_by_role("alert")).to_contain_text("Model, model, hidden")
    expect(page.locator("#model_json")).to_have_value('{"model": {"hidden": -1}}')
    page.locator("#model_json").fill("{")
    page.get_by_role("button", name="Search layouts").click()
    expect(page.get_by_role("alert")).to_contain_text("not JSON")


def test_every_choice_of_the_form_comes_back_with_the_search(
    look: Callable[..., Look], service: Service
) -> None:
    found = look(service.url)
    page = found.page
    fill(found, service.url, "8")
    chosen = {"Precision": "mixed", "Optimizer": "lion", "Executor": "megatron", "Recompute": "full"}
    numbers = {"Recompute layers": "1", "Prediction layers": "0", "Time limit in seconds": "90"}
    for label, value in chosen.items():
        page.get_by_label(label, exact=True).select_option(value)
    for label, value in numbers.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Pipeline parallel").fill("2")
    page.get_by_label("core_attn").check()
    found.keep("layouts-form")
    page.get_by_role("button", name="Search layouts").click()
    page.wait_for_url("**/layouts/*")
    expect(page.locator("#ranking")).to_be_visible(timeout=ENDS)
    expect(page.locator("[aria-labelledby=settings] pre")).to_contain_text("--recompute-num-layers 1")
    page.get_by_role("link", name="Change and search again").click()
    for label, value in (chosen | numbers).items():
        expect(page.get_by_label(label, exact=True)).to_have_value(value)
    expect(page.get_by_label("core_attn")).to_be_checked()
    expect(page.get_by_label("moe_act")).not_to_be_checked()
    assert found.complaints == []
    page.get_by_text("Measured layers", exact=True).click()
    page.locator("#profiles_json").fill('[{"layouts": []}]')
    page.get_by_role("button", name="Search layouts").click()
    expect(page.get_by_role("alert")).to_contain_text("Profiles, 0: this is no profile")
    expect(page.locator("#profiles_json")).to_have_value('[{"layouts": []}]')


def test_it_needs_no_javascript(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url, java_script_enabled=False, color_scheme="dark")
    page = found.page
    fill(found, service.url, "4")
    page.get_by_label("Sensitivity").uncheck()
    page.get_by_role("button", name="Search layouts").click()
    page.wait_for_url("**/layouts/*")
    expect(page.locator("#ranking")).to_be_visible(timeout=ENDS)  # the page loads itself again
    expect(page.locator("#sensitivity")).to_have_count(0)
    found.keep("layouts-dark")
    page.get_by_role("link", name="Change and search again").click()
    page.wait_for_url("**/layouts?from=*")
    expect(page.get_by_label("Global batch")).to_have_value("4")
    assert json.loads(page.locator("#model_json").input_value()) == MODEL
