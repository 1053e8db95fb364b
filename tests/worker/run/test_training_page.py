"""Every option on the page docs/training.md exists."""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT
from zbv_worker.commands.cli import main

PAGE = (ROOT / "docs" / "training.md").read_text()


def test_every_option_of_the_page_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    table = PAGE[PAGE.index("## What the options do") :]
    assert set(re.findall(r"`(--[a-z-]+)", table)) <= known
