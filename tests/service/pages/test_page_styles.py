"""Files that pages load: their colours are tokens, and their scripts are strict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zbv_service.pages import shell
from zbv_service.pages.assets import STATIC_DIRECTORIES
from zbv_solver.export import report
from zbv_solver.export.report import STATIC

TEMPLATES = Path(shell.__file__).parent / "templates"
STYLES = sorted(
    {path for place in STATIC_DIRECTORIES for path in place.rglob("*.css")} - {STATIC / "zbv.css"}
)
CLASSIC = {"theme.js", "reload.js"}
SCRIPTS = sorted(path for place in STATIC_DIRECTORIES for path in place.rglob("*.js"))
TOKENS = set(re.findall(r"--([\w-]+):", (STATIC / "zbv.css").read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_a_style_takes_its_colours_from_the_tokens(path: Path) -> None:
    style = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(|hsl|prefers-color-scheme", style) == []
    own = set(re.findall(r"--([\w-]+):", style))
    assert set(re.findall(r"var\(--([\w-]+)", style)) <= TOKENS | own


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_strict_and_only_one_reads_the_theme(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert ('"use strict";' in script) == (path.name in CLASSIC), "modules are strict by themselves"
    assert not re.search(
        r"\beval\(|new Function|innerHTML|document\.write|onclick=|[sS]tyle\s*=\s*[`'\"]", script
    )
    assert ("prefers-color-scheme" in script) == (path.name == "theme.js")


def test_no_template_has_a_style_or_a_script_inside() -> None:
    """The content security policy allows neither."""
    for place in (TEMPLATES, report.STATIC.with_name("templates")):
        for path in sorted(place.glob("*.j2")):
            if path.name != "standalone.html.j2":
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"<style|\sstyle=|\son\w+=\"", text), path.name
                inline = re.findall(r"<script(?![^>]*src=)([^>]*)>", text)
                assert all("application/json" in each or "text/plain" in each for each in inline), path.name


def test_no_two_directories_have_a_file_of_the_same_name() -> None:
    names = [
        str(path.relative_to(place))
        for place in STATIC_DIRECTORIES
        for path in place.rglob("*")
        if path.is_file()
    ]
    assert len(set(names)) == len(names)
