"""Every command that the documentation shows is one that the programs accept."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from support.paths import ROOT

PARSERS = {
    "zbv": "zbv_solver.commands.cli",
    "zbv-service": "zbv_service.commands.cli",
    "zbv-worker": "zbv_worker.commands.cli",
    "python -m benchmarks": "benchmarks.cli",
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CALL = re.compile(r"(?:^|(?<!-t)\s|\(|bin/)(zbv(?:-service|-worker)?|python -m benchmarks) ([^|&<>;)]*)")


def blocks(page: Path) -> Iterator[str]:
    """The shell commands of a page, one per string: fenced as ``sh``, or indented."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^|\n)\n((?: {4}.*\n)+)", outside)
    for block in (*fenced, *indented):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()


def calls(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every call of our commands, also inside pipes, substitutions and launchers."""
    for line in blocks(page):
        for program, arguments in CALL.findall(re.sub(r"\s#.*", "", line)):
            words = shlex.split(arguments)
            if words[:1] not in (["--help"], ["--print-completion"]):  # these end the program
                yield program, words


@cache
def parser(program: str) -> ArgumentParser:
    built: ArgumentParser = import_module(PARSERS[program])._parser()
    return built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_accepted_and_name_files_that_exist(page: Path) -> None:
    for program, arguments in calls(page):
        parser(program).parse_args(arguments)
        for name in arguments:
            if name.startswith(("examples/", "benchmarks/")):
                assert (ROOT / name).is_file(), f"{program} {arguments}"


def test_commands_are_found() -> None:
    found = [program for page in PAGES for program, _ in calls(page)]
    assert {program: found.count(program) > 5 for program in PARSERS} == dict.fromkeys(PARSERS, True)


def test_make_targets_exist() -> None:
    shown = {
        target
        for page in PAGES
        for text in (*blocks(page), *re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
        for target in re.findall(r"^make ([a-z]+)", text)
    }
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shown - set(rules) == set()
    assert "run" in shown
