"""Every kind of page: axe-core finds nothing serious, keys reach all controls, phones show everything."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, ViewportSize
from zbv_solver.plans.plan import Plan

from web.browsing import PHONE, Look, Open, Service
from web.played_runs import play

KINDS = (
    *("home", "searches", "plans", "runs", "agents", "new", "search", "plan", "compare", "frontier"),
    *("layouts", "layout search", "run", "measured", "api", "missing", "problem type", "sign-in"),
)
CHARTS = {"plan", "compare", "measured"}
SERIOUS = {"serious", "critical"}
WIDE: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def addresses(service: Service, plan: Plan, layout_search: dict[str, Any]) -> dict[str, str]:
    """The address of each kind of page, in a service with a plan and a run."""
    search = service.call(f"/v1/searches?q={plan.plan_id}&limit=1")["searches"][0]["id"]
    run = play(service, plan, steps=4)
    run.beat(1)
    run.measured()
    paths = {
        "home": "/",
        "api": "/api",
        "new": "/new",
        "search": f"/searches/{search}",
        "plan": f"/plans/{plan.plan_id}",
        "compare": f"/plans/{plan.plan_id}/compare",
        "frontier": f"/plans/{plan.plan_id}/frontier",
        "layout search": f"/layouts/{layout_search['id']}",
        "run": f"/runs/{run.id}",
        "measured": f"/runs/{run.id}/measured",
        "missing": "/nothing",
        "problem type": "/errors/not-found",
    }
    return {kind: service.url + paths.get(kind, f"/{kind}") for kind in KINDS}


@pytest.fixture(scope="module")
def reader(look: Open, service: Service) -> Look:
    return look(service.url, reduced_motion="reduce")


FINDINGS = """async (options) => {
  // Of texts that look alike, as all their ancestors do, axe-core measures one: a page may have thousands.
  const looks = new Map(), known = new Set();
  for (const each of document.querySelectorAll("body, body *")) {
    const style = getComputedStyle(each);
    const ground = [style.backgroundColor, style.backgroundImage, style.opacity];
    const own = [each.localName, each.className, style.color, style.fontSize, style.fontWeight, ...ground];
    const look = `${looks.get(each.parentElement)} ${own}`;
    looks.set(each, look);
    const hasText = [...each.childNodes].some(({nodeName, data}) => nodeName === "#text" && data.trim());
    const isNew = hasText && each.checkVisibility() && !known.has(look);
    if (isNew) {
      known.add(look);
    }
    const isControl = each.closest("button, input, label, select, svg, textarea") !== null;
    each.toggleAttribute("data-measured", isNew || isControl);
  }
  axe.configure({rules: [{id: "color-contrast", selector: "[data-measured]"}]});
  const found = (await axe.run({resultTypes: ["violations"], ...options})).violations;
  return found.map(({impact, id, help, nodes: [{html}]}) =>
    [impact, `${id}: ${help}, as in ${html.slice(0, 200)}`]);
}"""


def findings(page: Page, *rules: str) -> list[str]:
    """The serious findings of axe-core, each with its first place."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate(FINDINGS, {"runOnly": [*rules]} if rules else {})
    return [text for impact, text in found if impact in SERIOUS]


WATCH = """() => {
  const all = 'a[href], button, input:not([type="hidden"]), select, textarea, summary, [tabindex="0"]';
  const reached = new Set(), texts = new Set(); // pages that follow something replace parts by equal ones
  window.unmarked = [];
  document.addEventListener("focusin", ({target}) => {
    reached.add(target);
    texts.add(target.outerHTML);
    const parts = [target, target.closest("label"), target.nextElementSibling, target.querySelector("*")];
    const hasOutline = parts.some((part) => part && getComputedStyle(part).outlineStyle !== "none");
    const mark = target.querySelector("svg .hit"); // in a picture, a line around the focused mark
    if (!hasOutline && (mark === null || getComputedStyle(mark).stroke === "none")) {
      window.unmarked.push(target.outerHTML.slice(0, 120));
    }
  });
  window.unreached = () => [...document.querySelectorAll(all)]
    .filter((part) => !reached.has(part) && !texts.has(part.outerHTML))
    .filter((part) => part.tabIndex >= 0 && !part.disabled)
    .filter((part) => part.checkVisibility({visibilityProperty: true}))
    .filter((part) => part.type !== "radio" || part.checked)
    .map((part) => part.outerHTML.slice(0, 120));
  return window.unreached().length;
}"""


FEW = """() => {
  const others = "details:nth-of-type(n + 4), [aria-labelledby=documents] > :nth-child(n + 14)";
  document.querySelectorAll(others).forEach((each) => each.remove());
}"""
"""Removes most calls and documents of the reference; one template makes all of them."""


def painted(page: Page) -> None:
    """Wait until changes are painted."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def go_through(page: Page) -> None:
    """Press Tab once around: everything is reached, and the focus is always visible.

    A page that follows something may remove what has the focus; then it begins at the top again.
    """
    stops = page.evaluate(WATCH) + 1  # the browser itself is one
    for press in range(2 * stops):
        if press >= stops and not page.evaluate("unreached().length"):
            break
        page.keyboard.press("Tab")
    assert page.evaluate("[unreached(), unmarked]") == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_accessible_by_keyboard_in_both_themes_and_on_a_phone(
    reader: Look, look: Open, addresses: dict[str, str], kind: str
) -> None:
    seen = look(reader.origin, is_known=False) if kind == "sign-in" else reader
    page = seen.page
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    seen.complaints.clear()
    seen.open(addresses[kind])
    if kind in CHARTS:  # these pages reload until their schedules are computed
        page.wait_for_selector('#chart[data-state="ready"]')
    assert page.locator("h1").count() == 1
    assert page.title().endswith("zbv") or kind == "home"
    page.set_viewport_size(PHONE["viewport"])
    painted(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
    page.set_viewport_size(WIDE)
    if kind == "api":
        page.evaluate(FEW)
    painted(page)
    assert findings(page) == []
    go_through(page)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    painted(page)
    assert findings(page, "color-contrast") == []
    assert [told for told in seen.complaints if "404 (Not Found)" not in told or kind != "missing"] == []
    assert seen.strangers() == []


def test_lists_can_be_skipped_to_printed_and_read_without_motion(
    reader: Look, addresses: dict[str, str]
) -> None:
    page = reader.page
    page.set_viewport_size(WIDE)
    page.emulate_media(media="screen", color_scheme="light", reduced_motion="reduce")
    reader.open(addresses["plans"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.getElementById('main').contains(document.activeElement)")
    moving = """() => {
      const row = document.querySelector("tbody tr");
      row.classList.add("fresh");
      return parseFloat(getComputedStyle(row).animationDuration);
    }"""
    assert page.evaluate(moving) <= 0.001
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) > 0.1
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("tbody tr").first.is_visible()
    for controls in (page.get_by_role("navigation", name="Pages"), page.locator(".filters")):
        assert not controls.is_visible()
    assert page.locator("h1").evaluate("part => getComputedStyle(part).color") == "rgb(27, 34, 48)"
