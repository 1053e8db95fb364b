"""A search in a browser: followed while it runs, stopped, and read after its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Route

from web.browsing import PROBLEM, Look, Service

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LONG: dict[str, Any] = {
    **PROBLEM,
    "pp_degree": 6,
    "microbatches": 24,
    "costs": {"forward": [1000] * 11 + [1900], "backward_input": 1100, "backward_weight": 700, "p2p": 50},
    "memory": {**PROBLEM["memory"], "limit": 16},
}
"""Uneven and tight: a thorough search of it takes most of a minute."""


class Line:
    """Forwards connections from ``port`` to a service until it is cut."""

    def __init__(self, address: str):
        target = urlsplit(address)
        self._target = (target.hostname or "", target.port or 80)
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.mend()

    @property
    def url(self) -> str:
        """Where a browser finds the service."""
        return f"http://127.0.0.1:{self.port}"

    def mend(self) -> None:
        """Answer, at the same port as before."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener, self.port = listener, listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """End every connection, and answer no more."""
        if self._listener is not None:
            ends, self._ends = [self._listener, *self._ends], []
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the line is cut
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def line_to(address: str) -> Iterator[Line]:
    """A line to a service, as long as the block runs."""
    line = Line(address)
    try:
        yield line
    finally:
        line.cut()


def ask(service: Service, problem: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = service.call("/v1/searches", {"problem": problem, "options": options})
    return found


def values(page: Page) -> dict[str, str]:
    """The numbers of the page by their names."""
    found = page.locator(".cards.live [data-value]")
    return dict(found.evaluate_all("all => all.map((each) => [each.dataset.value, each.textContent])"))


def drawn(page: Page) -> int:
    """How many improvements the chart shows, once it shows any."""
    page.wait_for_selector('#course[data-state="drawn"]')
    return int(page.get_attribute("#course", "data-points") or 0)


@pytest.fixture
def going_on(service: Service) -> Iterator[str]:
    """A search that runs until it is stopped."""
    search_id = ask(service, LONG, effort="thorough")["id"]
    yield search_id
    service.call(f"/v1/searches/{search_id}/cancel", {})


def test_a_search_is_followed_and_stopped_and_keeps_its_best(
    look: Callable[..., Look], service: Service, going_on: str
) -> None:
    found = look(service.url)
    page = found.page
    page.goto(f"{service.url}/searches/{going_on}")
    page.get_by_text("Live", exact=True).wait_for()
    page.wait_for_function("() => Number(document.getElementById('course').dataset.points) >= 3")
    assert page.title().endswith("gap · 6 ranks × 24 microbatches · zbv")
    assert page.locator("#course path.best").count() == 1
    assert page.locator("#state").inner_text() == "running"
    page.wait_for_function("() => parseFloat(document.querySelector('[data-value=elapsed]').textContent) > 0")
    before = float(values(page)["elapsed"].removesuffix(" s"))
    page.wait_for_function(
        "before => parseFloat(document.querySelector('[data-value=elapsed]').textContent) > before",
        arg=before,
    )
    box = page.locator("#course").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 100)
    assert "lower bound" in page.locator(".course-tip").inner_text()
    found.keep("live-search")

    second = ask(service, {**LONG, "microbatches": 5}, effort="quick")
    waits = look(service.url)
    waits.page.goto(f"{service.url}/searches/{second['id']}")
    waits.page.get_by_text("Next in the queue.").wait_for()
    waits.keep("live-search-queued")

    page.get_by_role("button", name="Stop and keep best plan").click()
    page.get_by_text("Stopped; best plan kept").wait_for()
    assert page.locator("#stop").count() == 0
    assert page.locator("#state").inner_text() == "cancelled"
    ended = service.call(f"/v1/searches/{going_on}")
    assert page.locator("#to-plan").get_attribute("href") == f"/plans/{ended['plan_id']}"
    assert f"{ended['objective']:,.0f}".replace(",", "\u202f") in values(page)["best"]
    page.get_by_text("All improvements").click()
    page.locator("#steps-body tr").first.wait_for()
    rows = page.locator("#steps-body tr").all_inner_texts()
    assert len(rows) == drawn(page)
    found.keep("live-search-stopped")
    waits.page.locator("#to-plan").wait_for()  # its turn has come, and it has ended
    for each in (found, waits):
        assert each.complaints == []
        assert each.strangers() == []


def test_an_ended_search_shows_its_progress_and_result(look: Callable[..., Look], service: Service) -> None:
    ended = ask(service, PROBLEM, effort="quick")
    service.search(PROBLEM)
    found = look(service.url, color_scheme="dark")
    found.page.goto(f"{service.url}/searches/{ended['id']}")
    events = service.call(f"/v1/searches/{ended['id']}/events?after=0")["events"]
    improvements = [event for event in events if event["event"] in ("improvement", "bound")]
    assert len(improvements) <= drawn(found.page) <= len(improvements) + 1
    said = found.page.locator("#outcome").inner_text()
    is_optimal = events[-1]["gap"] == 0
    assert ("Proved optimal" in said) == is_optimal
    assert ("Plan found" in said) == (not is_optimal)
    from_server = values(found.page)
    found.page.wait_for_timeout(300)
    assert values(found.page) == from_server, "the script writes numbers as the server does"
    found.page.get_by_role("link", name="Change and search again").click()
    found.page.get_by_text(f"This is the problem of search {ended['id'][:12]}.").wait_for()
    found.page.go_back()
    drawn(found.page)
    found.keep("live-search-dark")
    assert found.complaints == []


def test_an_infeasible_limit_links_to_a_feasible_one(look: Callable[..., Look], service: Service) -> None:
    tight = {**LONG, "microbatches": 4, "memory": {**PROBLEM["memory"], "limit": [3, 3, 12, 12, 12, 2]}}
    found = look(service.url)
    page = found.page
    page.goto(f"{service.url}/searches/{ask(service, tight, effort='quick')['id']}")
    page.get_by_text("No plan fits the memory limit").wait_for()
    assert page.locator(".shortages tbody tr").all_inner_texts() == ["0 to 1\t3\t4", "5\t2\t4"]
    page.locator("#course-panel").wait_for(state="detached")
    found.keep("live-search-infeasible")
    page.get_by_role("link", name="Search with that limit").click()
    page.locator('#verdict[aria-busy="false"]').filter(has_text="Ready to search.").wait_for()
    page.locator("#submit").click()
    page.get_by_role("link", name="Open plan").wait_for()
    assert found.complaints == []


def test_a_broken_stream_is_reported_and_resumed(
    look: Callable[..., Look], service: Service, going_on: str
) -> None:
    found = look(service.url)
    page = found.page
    with line_to(service.url) as line:
        (session,) = page.context.cookies(service.url)  # its name says for which port it is
        name = session["name"].rpartition("-")[0]
        page.context.add_cookies(
            [{"name": f"{name}-{line.port}", "value": session["value"], "url": line.url}]
        )
        page.goto(f"{line.url}/searches/{going_on}")
        before = drawn(page)
        line.cut()
        page.get_by_text("Connection lost; reconnecting").wait_for()
        found.keep("live-search-broken")
        line.mend()
        page.get_by_text("Live", exact=True).wait_for()
        page.get_by_role("button", name="Stop and keep best plan").click()
        page.locator("#to-plan").wait_for()
        assert drawn(page) >= before
        told = service.call(f"/v1/searches/{going_on}/events?after=0")["events"]
        page.get_by_text("All improvements").click()
        course = [event for event in told if event["event"] in ("improvement", "bound")]
        page.locator("#steps-body tr").first.wait_for()
        shown = page.locator("#steps-body tr").count()
        assert shown in (len(course), len(course) + 1), "no event is lost or repeated"
    assert all("net::ERR_" in text for text in found.complaints), found.complaints


def test_without_streams_the_page_polls(look: Callable[..., Look], service: Service, going_on: str) -> None:
    def no_streams(route: Route) -> None:
        if "text/event-stream" in route.request.headers["accept"]:
            route.fulfill(status=502, body="a proxy that knows no streams")
        else:
            route.continue_()

    found = look(service.url, has_clock=True, **PHONE)
    found.page.route("**/events*", no_streams)
    found.page.goto(f"{service.url}/searches/{going_on}")
    found.soon(found.page.get_by_text("Polling every two seconds"))
    assert drawn(found.page) > 0
    assert found.page.evaluate("document.documentElement.scrollWidth") == 390
    found.keep("live-search-phone")
    service.call(f"/v1/searches/{going_on}/cancel", {})
    found.soon(found.page.locator("#to-plan"))


def test_deleting_a_search_notifies_other_open_pages(look: Callable[..., Look], service: Service) -> None:
    search_id = ask(service, {**LONG, "microbatches": 25}, effort="thorough")["id"]
    deletes, looks = look(service.url), look(service.url)
    for each in (deletes, looks):
        each.page.goto(f"{service.url}/searches/{search_id}")
        drawn(each.page)
    deletes.page.get_by_role("button", name="Delete this search").click()
    deletes.page.wait_for_url(f"{service.url}/searches")
    looks.page.get_by_text("This search was deleted. Its plan, if any, is kept.").wait_for()
    assert looks.page.get_by_role("button", name="Delete this search").count() == 0
    assert deletes.complaints == []
    assert looks.complaints == []


def test_without_javascript_the_numbers_are_there(
    look: Callable[..., Look], service: Service, going_on: str
) -> None:
    found = look(service.url, java_script_enabled=False)
    found.page.goto(f"{service.url}/searches/{going_on}")
    assert "The chart needs JavaScript" in found.page.locator("main").inner_text()
    assert found.page.locator('noscript meta[http-equiv="refresh"], meta[http-equiv="refresh"]').count() == 1
