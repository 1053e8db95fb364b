"""``make pictures``: take the pictures of pages in this folder again.

The service and the browser are those of the tests in ``tests/web``.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from PIL import Image
from playwright.sync_api import TimeoutError, ViewportSize
from web.browsing import Look, Service, a_browser, serving

FOLDER = Path(__file__).parent
SIZE: ViewportSize = {"width": 1280, "height": 800}
SCALE = 1.5
COLOURS = 256
"""Of a picture's palette: pages have few, and files with palettes are a third as large."""
IMPROVEMENTS = 8
"""That a search has made when its picture is taken, if it makes them within the time that is waited."""
LIVE_SECONDS = 40.0
WAIT_SECONDS = 300.0

_COSTS: dict[str, Any] = {
    **{"forward": [11, 10, 10, 10, 10, 10, 10, 9], "backward_input": [11] * 7 + [12]},
    **{"backward_weight": [8] + [7] * 7, "p2p": 1},
}
_MEMORY: dict[str, Any] = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": 16}
PROBLEM: dict[str, Any] = {
    "pp_degree": 4,
    "microbatches": 12,
    "costs": _COSTS,
    "memory": _MEMORY,
    "units": {"time": "ms", "memory": "GiB"},
}
LARGER: dict[str, Any] = {
    "pp_degree": 8,
    "microbatches": 48,
    "costs": {"forward": 10, "backward_input": [12, 11], "backward_weight": [7, 8], "p2p": 2},
    "memory": {**_MEMORY, "limit": 26},
    "units": {"time": "ms", "memory": "GiB"},
}


def main() -> None:
    """Write every picture: ``page-NAME-light.png`` and ``page-NAME-dark.png``."""
    with tempfile.TemporaryDirectory() as state, serving(Path(state)) as service, browsing(service) as seen:
        plan_id = service.search(PROBLEM).plan_id
        for name, show in (
            ("plan", lambda: the_plan(seen, plan_id)),
            ("compare", lambda: the_comparison(seen, plan_id)),
            ("frontier", lambda: the_frontier(seen, plan_id)),
            ("search", lambda: the_search(seen, service)),
        ):
            take(seen, name, show)


@contextmanager
def browsing(service: Service) -> Iterator[Look]:
    """A signed-in browser."""
    with a_browser() as browser:
        page = browser.new_page(viewport=SIZE, device_scale_factor=SCALE, reduced_motion="reduce")
        page.set_default_timeout(1000 * WAIT_SECONDS)
        seen = Look(page, service.url)
        seen.sign_in()
        yield seen


def take(seen: Look, name: str, show: Callable[[], None]) -> None:
    """A page in both themes, as files with few colours."""
    show()
    for theme in ("light", "dark"):
        seen.page.emulate_media(color_scheme=theme)
        seen.page.wait_for_function(f"() => document.documentElement.dataset.theme === '{theme}'")
        seen.page.wait_for_timeout(500)  # charts repaint, and screenshots show the painted state
        picture = Image.open(io.BytesIO(seen.page.screenshot())).convert("RGB")
        path = FOLDER / f"page-{name}-{theme}.png"
        _of_few_colours(picture).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size // 1024} KiB")  # noqa: T201 - a command


def the_plan(seen: Look, plan_id: str) -> None:
    """A plan, with an action pointed out."""
    seen.open(f"{seen.origin}/plans/{plan_id}")
    seen.page.get_by_role("button", name="Critical path").click()


def the_comparison(seen: Look, plan_id: str) -> None:
    """A plan with classical schedules."""
    seen.open(f"{seen.origin}/plans/{plan_id}/compare")
    seen.page.locator("#chart").scroll_into_view_if_needed()
    seen.page.evaluate("document.getElementById('schedules').scrollIntoView()")


def the_frontier(seen: Look, plan_id: str) -> None:
    """The frontier, with every limit searched."""
    page = seen.page
    seen.open(f"{seen.origin}/plans/{plan_id}/frontier")
    page.locator("select[name=effort]").first.select_option("quick")
    page.get_by_role("button", name="missing point").click()
    page.wait_for_load_state()
    page.wait_for_function("() => document.querySelector('[data-live=frontier][data-open]') === null")


def the_search(seen: Look, service: Service) -> None:
    """A running search."""
    options = {"effort": "thorough", "time_limit": 120}
    search_id = service.call("/v1/searches", {"problem": LARGER, "options": options})["id"]
    until = time.monotonic() + WAIT_SECONDS
    while service.call(f"/v1/searches/{search_id}")["objective"] is None and time.monotonic() < until:
        time.sleep(0.2)
    seen.page.goto(f"{seen.origin}/searches/{search_id}")
    enough = f"() => document.querySelectorAll('#improvements tbody tr').length >= {IMPROVEMENTS}"
    with suppress(TimeoutError):
        seen.page.wait_for_function(enough, timeout=1000 * LIVE_SECONDS)


def _of_few_colours(picture: Image.Image) -> Image.Image:
    """The picture in its own most frequent colours: flat surfaces stay exactly as they are."""
    counted = cast("list[tuple[int, tuple[int, ...]]]", picture.getcolors(picture.width * picture.height))
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in sorted(counted, reverse=True)[:COLOURS] for part in colour])
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
