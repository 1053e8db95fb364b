"""Relative links of every Markdown file, and names of modules in all texts, lead to something that exists."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True, timeout=60).split()
PAGES = [ROOT / name for name in LISTED]
NAME = re.compile(r"\bzbv_(?:solver|models|service|worker)(?:\.(?!__)[A-Za-z_]\w*)+")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and MyST with it, give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    broken = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


def test_every_module_and_name_that_a_text_refers_to_exists() -> None:
    """Names such as ``zbv_solver.plans.plan.Plan`` in docstrings, documentation and configuration."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True, timeout=60).split()
    texts = [ROOT / name for name in listed if name.endswith((".py", ".md", ".toml", ".yaml", ".sbatch"))]
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path.is_file() and path.name != "CHANGELOG.md"
        for name in re.findall(
            r"\bzbv_(?:solver|models|service|worker)(?:\.(?!__)[A-Za-z_]\w*)+", path.read_text("utf-8")
        )
        if not is_defined(name)
    }
    assert wrong == set()


@cache
def is_defined(name: str) -> bool:
    """Whether a dotted name is a module, or a name that the text of its module contains at top level."""
    package, *parts = name.split(".")
    part = "solver" if package == "zbv_models" else package.removeprefix("zbv_")
    place = ROOT / part / package
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    module = place / "__init__.py" if place.is_dir() else place
    if not parts or not module.is_file():
        return not parts
    defined = rf"^(?:async def |def |class )?{parts[0]}\b|\b{parts[0]}[,\n]"
    return re.search(defined, module.read_text("utf-8"), re.MULTILINE) is not None
