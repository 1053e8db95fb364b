"""``python -m benchmarks service page`` measures real pages, and names missing tools."""

from __future__ import annotations

import sys

import pytest

from benchmarks.cli import main
from benchmarks.service import page


def test_a_page_is_opened_and_everything_about_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OPENINGS", 2), ("ZOOMS", 1), ("WARM_SECONDS", 0.0)):
        monkeypatch.setattr(page, name, value)
    monkeypatch.setattr(page, "SIZES", (page.Size(2, 3, drawn=1e-3, redraw=1e-3, memory=1.0),))
    found = page.measure()
    assert len({each.what for each in found}) == len(found) == 10
    assert all(each.value > 0 for each in found)
    asked = [each for each in found if each.target is not None]
    assert [each.unit for each in asked] == ["s"] * 4 + ["MB"]
    assert all(each.excess > 0 for each in asked), "no page can be that fast"


def test_a_missing_playwright_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    assert main(["service", "page"]) == 1
    assert "pip install 'zbv[dev]'" in capsys.readouterr().err


def test_a_missing_browser_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "BROWSERS", ("no-such-browser",))
    assert main(["service", "page"]) == 1
    assert "found no browser; must be one of no-such-browser" in capsys.readouterr().err
