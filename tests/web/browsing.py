"""A real service as a user starts it, and a page in a browser."""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, TimeoutError, sync_playwright
from support.served import SEARCHES_PRELOAD, start_services
from zbv_service.client import AgentClient
from zbv_service.client.tokens import find
from zbv_solver.plans.plan import Plan

BROWSERS = (
    "chromium-headless-shell",  # the same without windows, which nobody sees here: a third less work
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
# A browser that only talks to the page under test: no updates, no QUIC, no first-run pages.
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SEARCH_SECONDS = 240.0
SOON_SECONDS = 300.0
"""A page may wait for several searches."""
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
# A message about the speed of the machine.
HARMLESS = re.compile(
    "was preloaded using link preload but not used within|Autofocus processing was blocked because a document"
)


@dataclass
class Look:
    """A page in the browser, with its console messages and requests."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        """Go to a page and wait until its chart, if it has one, is drawn."""
        self.page.goto(url)
        if self.page.locator("#chart").count():
            self.page.wait_for_selector('#chart[data-state="ready"]')

    def sign_in(self) -> None:
        """Sign in with a link that works once, like the user who started the service."""
        with AgentClient(self.origin) as client:
            self.page.goto(client.sign_in_link())
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{self.origin}/")

    def soon(self, wanted: Locator, state: Literal["visible", "hidden", "attached"] = "visible") -> None:
        """Wait for an element of a page with a controlled clock: its timers run out at once."""
        until = time.monotonic() + SOON_SECONDS
        while True:
            self.page.clock.fast_forward(3000)
            try:
                wanted.wait_for(state=state, timeout=200)
                return
            except TimeoutError:
                if time.monotonic() > until:
                    raise

    def strangers(self) -> list[str]:
        """Requests that left the origin."""
        inside = (self.origin, "data:", "blob:")
        return [url for url in self.requests if not url.startswith(inside)]

    def draw_area(self, at: int = 0) -> tuple[float, float, float, float]:
        """Left, top, width and height of the frame of a Gantt chart in the window, in pixels."""
        left, top, width, height = self.page.evaluate(
            """(at) => {
              const { canvas, frame } = zbv.chart.gantts[at].surface;
              canvas.scrollIntoView({block: "center", behavior: "instant"});
              const box = canvas.getBoundingClientRect();
              return [box.left + frame.left, box.top + frame.top, frame.width, frame.height];
            }""",
            at,
        )
        return left, top, width, height

    def window(self) -> tuple[float, float]:
        """The part of time that the chart shows."""
        start, end = self.page.evaluate("() => [zbv.chart.range.start, zbv.chart.range.end]")
        return start, end

    def settle(self) -> None:
        """Wait until the chart shows the range."""
        self.page.wait_for_function(
            """() => {
              const { start, end } = zbv.chart.range;
              return document.getElementById("chart").dataset.window === `${start} ${end}`;
            }"""
        )

    def drawn(self, what: str, at: int = 0) -> Any:
        """The contents of a Gantt chart: ``bars``, ``labels``, ``idle.left``, ``path.x`` and so on."""
        return self.page.evaluate(f"(at) => zbv.chart.gantts[at].drawn.{what}", at)

    def screen(self) -> NDArray[np.uint8]:
        """The window as painted: (height, width, 3)."""
        return np.asarray(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))

    def colour_at(self, x: float, y: float) -> tuple[int, ...]:
        """Red, green and blue of a point of the window, as painted."""
        return tuple(self.screen()[round(y), round(x)].tolist())

    def point_at(self, time_at: float, rank: int, ranks: int, lane: int = 0) -> tuple[float, float]:
        """Where a time on a rank is in the window, in pixels."""
        left, top, width, height = self.draw_area(lane)
        start, end = self.window()
        return left + (time_at - start) / (end - start) * width, top + (rank + 0.5) / ranks * height

    def tooltip(self) -> Locator:
        """The tooltip that is open."""
        return self.page.locator(".tip").filter(visible=True).first


Open = Callable[..., Look]
"""Opens a new profile: ``look(origin, …)``."""


@dataclass(frozen=True)
class Service:
    """The running service."""

    url: str
    client: AgentClient

    def search(self, problem: Any) -> Plan:
        """Have a problem searched, and wait for the plan."""
        asked = self.client.submit(problem, {"effort": "quick"})
        ended = self.client.wait(asked.id, timeout=SEARCH_SECONDS)
        return self.client.plan(str(ended.plan_id))

    def call(self, path: str, body: Any = None) -> Any:
        """GET a document, or POST one."""
        fields = {"Authorization": f"Bearer {find(self.url)}"}
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, self.url + path, json=body, headers=fields, timeout=120)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def serving(directory: Path) -> Iterator[Service]:
    """A service with its state in a directory; its thorough searches with a seed wait without work."""
    with ExitStack() as stack:
        variables = {SEARCHES_PRELOAD: "", "ZBV_AGENT_TIMEOUT_SECONDS": "3600"}  # tests play the agents
        (served,) = start_services(stack, directory, 1, *("--port=0", "--searches=1"), variables=variables)
        yield Service(served.address, stack.enter_context(AgentClient(served.address)))


@contextmanager
def a_browser() -> Iterator[Browser]:
    """The first of the browsers that is installed."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path is not None, f"No browser found (looked for {', '.join(BROWSERS)}). Run: make browser"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(BROWSER_FLAGS))
        yield browser
        browser.close()


PROBLEM: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 8,
    "costs": {"forward": 1000, "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16},
    "units": {"time": "us"},
}
LAYOUTS = {
    "model_json": '{"model": {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 1024, "sequence": 512}}',
    "device": "h100",
    "nodes": "1",
    "gpus_per_node": "2",
    "global_batch": "4",
    "top": "5",
    "microbatch_size": "1",
    "sensitivity": "on",
}
"""Fields of the form for layouts: a small model on one node of two devices."""
