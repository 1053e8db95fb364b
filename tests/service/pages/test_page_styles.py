"""Files that only the service's pages load: colours are the style sheet's tokens, and scripts are strict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zbv_service.pages.shell import STATIC_DIRECTORIES
from zbv_solver.export.report import STATIC

PAGES = STATIC_DIRECTORIES["/static/pages"]
STYLES = sorted(PAGES.rglob("*.css"))
SCRIPTS = sorted([*PAGES.rglob("*.js"), *STATIC.rglob("*.js")])
TOKENS = set(re.findall(r"--([\w-]+):", (STATIC / "zbv.css").read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_a_style_takes_its_colours_from_the_tokens(path: Path) -> None:
    style = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(|hsl|prefers-color-scheme", style) == []
    own = set(re.findall(r"--([\w-]+):", style))
    assert set(re.findall(r"var\(--([\w-]+)", style)) <= TOKENS | own


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_strict_and_leaves_themes_to_the_one_that_knows(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    is_module = re.search(r"^(import|export) ", script, re.MULTILINE) is not None
    assert is_module or '"use strict";' in script
    assert not re.search(r"\beval\(|new Function|innerHTML|document\.write|onclick=", script)
    assert ("prefers-color-scheme" in script) == (path.name == "theme.js")
