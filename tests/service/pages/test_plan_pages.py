"""The page of a plan as it is served, and the files that pages load: their addresses, rules and colours."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.contrast import contrast
from support.serving import PROBLEM, Service
from zbv_service.pages import shell
from zbv_service.pages.assets import STATIC_DIRECTORIES, assets
from zbv_service.pages.plan import plan_page
from zbv_service.pages.shell import Shell
from zbv_solver.export import report
from zbv_solver.export.palette import FILLS, INKS
from zbv_solver.export.report import STATIC
from zbv_solver.export.timeline import timeline, timeline_bytes, timeline_facts
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import baseline_plan

PLAN = baseline_plan("1f1b", parse_problem(PROBLEM))


async def test_a_page_loads_the_actions_of_its_plan_and_leads_on(service: Service) -> None:
    plan_id = await service.import_plan()
    plan = parse_plan(await service.get(f"/v1/plans/{plan_id}"))
    page = (await service.http.get(f"/plans/{plan_id}")).text
    [facts] = re.findall(r'id="chart-timeline">([^<]+)<', page)
    assert json.loads(facts) == timeline_facts(timeline(plan), plan.problem)
    [address] = re.findall(r'data-actions="([^"]+)"', page)
    assert f'<link rel="preload" as="fetch" href="{address}"' in page
    assert (await service.http.get(address)).content == timeline_bytes(timeline(plan))
    exports = re.findall(r'<a class="button" href="([^"]+)"[^>]*>([\w-]+)</a>', page.split('"exports"')[1])
    formats = ["json", "torch-csv", "torch-comms-csv", "torchtitan", "chrome-trace", "svg", "html"]
    assert [name for _, name in exports] == formats
    for url, name in exports:
        answer = await service.http.get(url)
        assert answer.status_code == 200, url
        assert "attachment" in answer.headers.get("content-disposition", "") or name == "json"
    for path in (f"/new?from={plan_id}", f"/plans/{plan_id}/compare", f"/plans/{plan_id}/frontier"):
        assert f'href="{path}"' in page
    for path in ("", "/actions"):
        assert (await service.http.get(f"/plans/{'0' * 64}{path}")).status_code == 404


async def test_scripts_and_styles_are_compressed_and_immutable_below_their_version(service: Service) -> None:
    page = await service.http.get(f"/plans/{await service.import_plan()}")
    addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    names = [address.removeprefix(f"/static/{assets()}/") for address in addresses]
    assert [name for name in names if name in report.MODULES] == [*report.MODULES, "plan.js"]
    assert {"zbv.css", "pages.css", "chart.css", "theme.js", "icon.svg"} <= set(names)
    for address in addresses:
        kept = await service.http.get(address)
        assert kept.status_code == 200, address
        assert "immutable" in kept.headers["cache-control"], address
    for other in ("plan.js", f"{'0' * 12}/plan.js", f"plan.js?v={assets()}"):
        changing = await service.http.get(f"/static/{other}")
        assert (changing.status_code, changing.headers["cache-control"]) == (200, "no-cache"), other
    missing = await service.http.get(f"/static/{assets()}/nothing.js")
    assert missing.status_code == 404
    assert "immutable" not in missing.headers.get("cache-control", "")

    for at, name in enumerate(report.MODULES):
        text = (await service.http.get(f"/static/{assets()}/{name}")).text
        imported = re.findall(r'^import .* from "\./([^"]+)";', text, re.MULTILINE)
        assert set(imported) <= set(report.MODULES[:at]), f"{name} imports what the page preloads"
    address = f"/static/{assets()}/timeline.js"
    plain = await service.http.get(address, headers={"Accept-Encoding": "identity"})
    packed = await service.http.get(address, headers={"Accept-Encoding": "gzip"})
    assert packed.content == plain.content
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert "content-encoding" not in plain.headers
    again = await service.http.get(address, headers={"If-None-Match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("search", "Change and search again"),
        ("launch", f"zbv-service run --plan {PLAN.plan_id} --model package.module:factory --nodes 1"),
    ],
)
def test_a_reader_is_invited_to_what_its_scopes_allow(scope: str, words: str) -> None:
    view = report.plan_view(PLAN)
    for may, is_invited in ((set(), True), ({"read"}, False), ({"read", scope}, True)):
        assert (words in plan_page(view, Shell(may=frozenset(may))).decode()) == is_invited


def test_a_plan_without_a_memory_limit_says_what_a_limit_may_cost() -> None:
    hint = "The problem has no memory limit"
    view = replace(report.plan_view(PLAN), has_memory=True, is_limited=False)
    page = plan_page(view, Shell()).decode()
    assert hint in page
    assert page.index(hint) < page.index(f'<a href="/plans/{PLAN.plan_id}/frontier">Memory and time</a>')
    for other in (replace(view, is_limited=True), replace(view, has_memory=False)):
        assert hint not in plan_page(other, Shell()).decode()


# --- files

FILES = [path for place in STATIC_DIRECTORIES for path in sorted(place.rglob("*")) if path.is_file()]
BASE = (STATIC / "zbv.css").read_text(encoding="utf-8")
ROOT, REST = BASE.split("}", 1)
TOKENS = dict(re.findall(r"^  --([\w-]+): ([^;]*);$", ROOT, re.MULTILINE))


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".css"], ids=lambda it: it.name)
def test_a_style_takes_its_colours_from_the_tokens(path: Path) -> None:
    text = REST if path.name == "zbv.css" else path.read_text(encoding="utf-8")
    style = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(|hsl|prefers-color-scheme", style) == []
    own = set(re.findall(r"--([\w-]+):", style))
    assert set(re.findall(r"var\(--([\w-]+)", style)) <= TOKENS.keys() | own


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda it: it.name)
def test_scripts_are_strict_and_only_one_reads_the_theme(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    is_classic = path.name in ("theme.js", "reload.js")
    assert ('"use strict";' in script) == is_classic, "modules are strict by themselves"
    unsafe = r"\beval\(|new Function|innerHTML|document\.write|onclick=|[sS]tyle\s*=\s*[`'\"]"
    assert not re.search(unsafe, script)
    assert ("prefers-color-scheme" in script) == (path.name == "theme.js")


def test_no_template_has_a_style_or_a_script_inside_and_names_of_files_differ() -> None:
    """The content security policy allows neither."""
    for place in (Path(shell.__file__).parent / "templates", report.STATIC.with_name("templates")):
        for path in sorted(place.glob("*.j2")):
            if path.name != "standalone.html.j2":
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"<style|\sstyle=|\son\w+=\"", text), path.name
                inline = re.findall(r"<script(?![^>]*src=)([^>]*)>", text)
                assert all("application/json" in each or "text/plain" in each for each in inline), path.name
    names = [str(path.relative_to(place)) for place in STATIC_DIRECTORIES for path in place.rglob("*.*")]
    assert len(set(names)) == len(names)


# --- colours

GROUNDS = ("page", "surface", "raised")
TEXT = [
    *product(("text", "muted", "accent", "good", "bad"), GROUNDS),
    *(("text", "hover"), ("muted", "hover"), ("accent-ink", "accent"), ("accent-ink", "accent-strong")),
    *(("good", "good-back"), ("bad", "bad-back")),
    *((f"ink{chunk}", f"{letter}{chunk}") for letter in "fiwb" for chunk in (0, 1)),
]
SHAPES = [
    *product(("control", "accent", "limit"), GROUNDS),
    *((f"{letter}{chunk}", "chart") for letter in "fiwb" for chunk in (0, 1)),
]
DECORATION = {"line", "idle"}
"""Lines between things that are apart anyway, and a tint under a hatch that carries the contrast."""


def colours(theme: str) -> dict[str, str]:
    """The colour tokens as they are in a theme."""
    found = {}
    for name, value in TOKENS.items():
        both = re.findall(r"#[0-9a-f]{6}", value)
        if re.fullmatch(r"#[0-9a-f]{6}|light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\)", value):
            found[name] = both[0] if theme == "light" else both[-1]
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("pairs", "least"), [(TEXT, 4.5), (SHAPES, 2.95)], ids=["text", "shapes"])
def test_colours_have_enough_contrast(theme: str, pairs: list[tuple[str, str]], least: float) -> None:
    """WCAG 1.4.3 and 1.4.11: 4.5:1 for text, 3:1 (less 8-bit rounding) for shapes."""
    found = colours(theme)
    for colour, ground in pairs:
        ratio = contrast(found[colour], found[ground])
        assert ratio >= least, f"{colour} on {ground} has {ratio:.2f}"


def test_every_colour_has_a_contrast_rule_and_those_of_actions_are_the_same_in_exports() -> None:
    found = colours("light")
    held = {name for pair in (*TEXT, *SHAPES) for name in pair} | DECORATION
    assert found.keys() == held, "add the pairs in which a new token is used"
    assert TOKENS.keys() - found.keys() == {"shadow", "mono"}, "colours are #rrggbb or light-dark(…)"
    for letter, shades in FILLS.items():
        assert tuple(found[f"{letter.lower()}{shade}"] for shade in (0, 1)) == shades
    assert (found["ink0"], found["ink1"]) == INKS
