"""A running service with a plan in it, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, StorageState
from support.drawn_plans import one_by_one
from zbv_service.pages.layouts import LayoutForm
from zbv_solver.plans.plan import Plan

from web.browsing import HARMLESS, LAYOUTS, PROBLEM, SEARCH_SECONDS, Look, Service, a_browser, serving


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service")) as found:
        yield found


# Playwright runs an event loop in this thread until it ends. It must end with this package: other tests in
# the same process start other loops.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with a_browser() as started:
        yield started


@pytest.fixture(scope="session")
def signed_in() -> dict[str, StorageState]:
    """The cookies of signed-in profiles by origin, so that one sign-in serves all tests."""
    return {}


@pytest.fixture(scope="module")
def profiles() -> Iterator[list[Look]]:
    """The open pages, the newest last."""
    opened: list[Look] = []
    yield opened
    for each in opened:
        each.page.context.close()


@pytest.fixture(autouse=True)
def _tests_close_what_they_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the pages of a test, which would go on following their search or run."""
    if "look" not in request.fixturenames:
        yield
        return
    opened: list[Look] = request.getfixturevalue("profiles")
    of_the_module = len(opened)
    yield
    while len(opened) > of_the_module:
        opened.pop().page.context.close()


@pytest.fixture(scope="module")
def look(browser: Browser, profiles: list[Look], signed_in: dict[str, StorageState]) -> Callable[..., Look]:
    """Open a new profile, signed in unless ``is_known`` is false: ``look(origin, color_scheme="dark", …)``.

    With ``has_clock`` the test controls the page's clock: see :meth:`Look.soon`.
    """

    def make(origin: str, *, is_known: bool = True, has_clock: bool = False, **options: Any) -> Look:
        known = signed_in.get(origin) if is_known else None
        chosen = {"viewport": {"width": 1280, "height": 900}, "storage_state": known, **options}
        context = browser.new_context(**chosen)
        context.set_default_timeout(120_000)
        found = Look(context.new_page(), origin)
        page = found.page
        if has_clock:
            page.clock.install()
        page.on("pageerror", lambda error: found.complaints.append(str(error)))

        def note(message: ConsoleMessage) -> None:
            if not HARMLESS.search(message.text):
                found.complaints.append(f"{message.type}: {message.text}")

        page.on("console", note)
        page.on("request", lambda request: found.requests.append(request.url))
        profiles.append(found)
        if is_known and known is None and origin.startswith("http"):
            found.sign_in()
            signed_in[origin] = context.storage_state()
        return found

    return make


@pytest.fixture(scope="session")
def plan(service: Service) -> Plan:
    """A small plan found by the service: every action is a bar."""
    return service.search(PROBLEM)


@pytest.fixture(scope="session")
def layout_search(service: Service) -> dict[str, Any]:
    """A finished search for the layouts of the form with the fields above, with a sensitivity."""
    form = LayoutForm.parse({name: [value] for name, value in LAYOUTS.items()})
    search_id = service.client.submit_layouts(form.document()).id
    assert service.client.wait(search_id, timeout=SEARCH_SECONDS).state == "done"
    found: dict[str, Any] = service.call(f"/v1/searches/{search_id}")
    return found


@pytest.fixture(scope="session")
def large_plan() -> Plan:
    """More actions than are drawn one by one."""
    return one_by_one(8, 200, memory=PROBLEM["memory"], units=PROBLEM["units"])
