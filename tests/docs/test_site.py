"""``make docs`` builds the site without a warning, and the site loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.paths import ROOT
from zbv_solver.export import FORMATS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (options,) = re.findall(
        r"^\t\$\(BIN\)/python (-m sphinx .*) docs build/docs$", (ROOT / "Makefile").read_text(), re.M
    )
    command = [sys.executable, *options.split(), "-d", str(folder / "cache"), "docs", str(folder / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "html"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    tag = r"<(?:script|img|iframe|link rel=\"stylesheet\")[^>]*(?:src|href)=\"(?:https?:)?//"
    loaded = re.compile(rf"{tag}|@import|url\(['\"]?(?:https?:)?//")
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 20
    assert [path.name for path in files if loaded.search(path.read_text(encoding="utf-8"))] == []


def test_the_reference_contains_every_command_operation_and_public_name(site: Path) -> None:
    def shown(page: str) -> str:
        return html.unescape(re.sub(r"<[^>]*>", "", (site / page).read_text(encoding="utf-8")))

    for name in ("zbv plan", "zbv refit", "zbv-service token create", "zbv-worker agent"):
        assert f"usage: {name} " in shown("commands.html")
    assert "PUT /v1/agents/{agent_id}/runs" in shown("http.html")
    python = shown("python.html")
    packages = ("zbv_solver", "zbv_service.client", "zbv_worker", "zbv_worker.model")
    for package in packages:
        names = [name for name in import_module(package).__all__ if not name.startswith("_")]
        # What two packages offer is described once.
        assert [n for n in names if not any(f"{each}.{n}" in python for each in packages)] == []


def test_no_page_replaces_one_that_sphinx_makes(site: Path) -> None:
    assert not {"search", "genindex", "py-modindex"} & {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert "Search and bounds" in (site / "index.html").read_text(encoding="utf-8")


def test_every_export_format_is_documented() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").partition("## Exports")[2]
    assert [name for name in FORMATS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "part", ["solver/zbv_solver", "solver/zbv_models", "service/zbv_service", "worker/zbv_worker"]
)
def test_the_architecture_page_lists_every_folder_of_a_part(part: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = next(text for text in page.split("\n## ") if f"`{Path(part).name}`" in text.partition("|")[0])
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    assert listed == {path.parent.name for path in (ROOT / part).glob("*/__init__.py")}
