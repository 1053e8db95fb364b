"""Time until a plan's page shows and redraws its chart, and the memory of the browser."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.findings import BenchmarkError, Finding, at_most, quantile
from benchmarks.service.served import Served, serving
from benchmarks.service.workload import plan_to_see

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chromium-headless-shell",
)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
OPENINGS = 3
ZOOMS = 12
WARM_SECONDS = 8.0
"""Time for a new service to load the code that draws pages."""
TIMEOUT_SECONDS = 60.0
MEGABYTE = 1e6

_PAINTED = """() => performance.getEntriesByName("zbv:drawn").length > 0
  || document.getElementById("chart")?.dataset.state === "failed" """
_FAILURE = """() => {
  const chart = document.getElementById("chart");
  return chart.dataset.state === "failed" ? chart.querySelector(".loading").textContent : null;
}"""
_DRAWN = "() => performance.getEntriesByName('zbv:drawn')[0].startTime"
_REDRAW = """async (how) => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const chart = document.getElementById("chart");
  const { range } = zbv.chart;
  const before = chart.dataset.window;
  const began = performance.now();
  document.querySelector(`[data-move="${how}"]`).click();
  if (before === `${range.start} ${range.end}`) {
    return null;
  }
  while (chart.dataset.window !== `${range.start} ${range.end}`) {
    await painted();
  }
  await painted();
  await painted();
  return performance.now() - began;
}"""
_CHOOSE = """() => {
  const field = document.getElementById("find-action");
  field.value = field.placeholder;
  field.form.requestSubmit();
}"""


class NotSeen(BenchmarkError):
    """There is no browser, or it could not show a page."""


@dataclass(frozen=True)
class Size:
    """The size of a plan, and the targets for its page in seconds and megabytes."""

    pp_degree: int
    microbatches: int
    drawn: float
    redraw: float | None = None
    memory: float | None = None


SIZES = (Size(8, 64, drawn=0.7), Size(64, 1024, drawn=2.0, redraw=0.5, memory=500.0))


@dataclass
class Seen:
    """Measurements of openings of a page, in seconds and bytes."""

    drawn: list[float] = field(default_factory=list)
    redraws: list[float] = field(default_factory=list)
    heap: float = 0.0
    resident: float = 0.0


def measure() -> list[Finding]:
    """Store a plan of every size, and open its page in a browser that has seen none.

    Raises
    ------
    NotSeen
        If there is no browser or no playwright, or a page does not draw its chart.
    """
    with _browser() as browser, serving("--auth", "none", "--searches", "1") as served:
        stored = [(size, _store(served, size)) for size in SIZES]
        # Restart the service: an old plan is usually not in its memory when somebody opens it.
        served.stop()
        served.start()
        time.sleep(WARM_SECONDS)
        return [found for size, plan_id in stored for found in _look(browser, served, size, plan_id)]


@contextmanager
def _browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import Error, sync_playwright
    except ModuleNotFoundError:
        raise NotSeen("playwright is not installed. Run: pip install 'zbv[dev]'") from None
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise NotSeen(f"found no browser; must be one of {', '.join(BROWSERS)}. Install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        except Error as error:
            raise NotSeen(f"the browser failed: {error.message}") from None
        finally:
            browser.close()


def _store(served: Served, size: Size) -> str:
    text = json.dumps(plan_to_see(size.pp_degree, size.microbatches)).encode()
    request = urllib.request.Request(f"{served.address}/v1/plans", text, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        plan_id: str = json.load(answer)["plan_id"]
    return plan_id


def _look(browser: Browser, served: Served, size: Size, plan_id: str) -> list[Finding]:
    address = f"{served.address}/plans/{plan_id}"
    seen = Seen()
    for _ in range(OPENINGS):
        _open(browser, address, seen)
    page_bytes, page_seconds = _fetch(address)
    data_bytes, data_seconds = _fetch(f"{address}/actions")
    name = f"{size.pp_degree} × {size.microbatches}:"
    return [
        Finding(f"{name} chart drawn, plan not in memory", seen.drawn[0], "s", at_most(size.drawn)),
        Finding("  again, worst", max(seen.drawn[1:]), "s", at_most(size.drawn)),
        Finding("  zoom or pan redrawn, median", quantile(seen.redraws, 0.5), "s", at_most(size.redraw)),
        Finding("  worst", max(seen.redraws), "s", at_most(size.redraw)),
        Finding("  memory of the page's process", seen.resident / MEGABYTE, "MB", at_most(size.memory)),
        Finding("  of it the heap of scripts", seen.heap / MEGABYTE, "MB"),
        Finding("  size of the page", page_bytes / MEGABYTE, "MB"),
        Finding("  size of its actions", data_bytes / MEGABYTE, "MB"),
        Finding("  time to fetch the page", page_seconds, "s"),
        Finding("  time to fetch the actions", data_seconds, "s"),
    ]


def _open(browser: Browser, address: str, seen: Seen) -> None:
    """Open the page in a fresh profile, where nothing is cached; zoom, pan, measure memory."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        page.set_default_timeout(1e3 * TIMEOUT_SECONDS)
        page.goto(address)
        page.wait_for_function(_PAINTED)
        failure: str | None = page.evaluate(_FAILURE)
        if failure is not None:
            raise NotSeen(failure)
        seen.drawn.append(page.evaluate(_DRAWN) / 1e3)
        for at in range(ZOOMS):
            for how in ("in", "right" if at % 2 else "left"):
                seen.redraws.extend(_redrawn(page, how))
        seen.redraws.extend(_redrawn(page, "all"))
        page.evaluate(_CHOOSE)
        page.wait_for_selector("#inspector:not([hidden])")
        metrics = context.new_cdp_session(page).send("Performance.getMetrics")["metrics"]
        heap = next((each["value"] for each in metrics if each["name"] == "JSHeapUsedSize"), 0.0)
        seen.heap = max(seen.heap, heap, page.evaluate("() => performance.memory.usedJSHeapSize"))
        seen.resident = max(seen.resident, _resident_of_pages(browser))
    finally:
        context.close()


def _redrawn(page: Page, how: str) -> list[float]:
    """Seconds of a redraw; empty if there was nothing to redraw."""
    took: float | None = page.evaluate(_REDRAW, how)
    return [] if took is None else [took / 1e3]


def _resident_of_pages(browser: Browser) -> float:
    """Resident bytes of the largest renderer process; there is only one page."""
    session = browser.new_browser_cdp_session()
    processes: list[dict[str, Any]] = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    renderers = [each["id"] for each in processes if each["type"] == "renderer"]
    return max((_resident(int(process)) for process in renderers), default=0.0)


def _resident(process: int) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024.0 * int(line.split()[1])
    return 0.0


def _fetch(address: str) -> tuple[int, float]:
    """Size of a response in bytes, and seconds until it arrived."""
    began = time.perf_counter()
    request = urllib.request.Request(address, headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return len(answer.read()), time.perf_counter() - began
