"""Who may import whom: worker → service's client → advisor → planner.

Inside a part, each folder imports only earlier ones.

Imports inside functions and under ``TYPE_CHECKING`` count like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = {
    "solver/zbv_solver": ("zbv_service", "zbv_worker", "torch", "fastapi", "sqlalchemy", "httpx"),
    "solver/zbv_models": ("zbv_service", "zbv_worker", "torch", "fastapi", "sqlalchemy", "httpx"),
    "service/zbv_service": ("zbv_worker", "torch"),
    "worker/zbv_worker": ("fastapi", "sqlalchemy", "uvicorn", "ortools"),
}

LINES = {
    "solver/zbv_solver": (
        "numerals errors _version documents kernels problem plans timing verify bounds construct improve "
        "partition search packing frontiers measure export __init__ commands"
    ),
    "solver/zbv_models": "__init__ estimate fixed_orders layouts",
    "worker/zbv_worker": (
        "errors host values model models transport failures stage adapters execution tracing measure "
        "gradients checkpoints pipeline run check agent commands __init__ __main__"
    ),
    "service/zbv_service": (
        "__init__ client observability errors settings records documents compute database security plans "
        "searches problems frontier runs api pages app commands"
    ),
}
"""The folders of a part, and the modules of its root, from the ground up: each imports only earlier ones."""

UPWARDS = ["solver/zbv_solver/plans/plan.py imports zbv_solver.export.html.plan_html"]
"""A notebook asks the plan itself for its picture."""


MODULES_OF_TORCH = {
    f"solver/zbv_models/estimate/{name}.py imports" for name in ("module_counts", "module_tree")
}
"""They read the module trees of transformers; another module imports them when a file needs that."""


@cache
def imports(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_only_what_they_may_know(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports(path)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert [each for each in wrong if not each.startswith(tuple(MODULES_OF_TORCH))] == []


def place(part: Path, name: str) -> str:
    """The folder, or module of the root, in which an imported name of a part lies."""
    first = name.split(".")[1]
    is_module = (part / first).is_dir() or (part / f"{first}.py").is_file()
    return first if is_module else "__init__"


@pytest.mark.parametrize("package", LINES)
def test_folders_import_only_earlier_ones(package: str) -> None:
    part, line = ROOT / package, LINES[package].split()
    wrong = []
    for path in sorted(part.rglob("*.py")):
        here = path.relative_to(part).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.split(".")[0] == part.name:
                there = place(part, name)
                if there != here and line.index(there) > line.index(here):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert [each for each in wrong if each not in UPWARDS] == []


@pytest.mark.parametrize("package", LINES)
def test_every_folder_has_its_place_in_the_line(package: str) -> None:
    files = [path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*.py")]
    found = {file.parts[0].removesuffix(".py") for file in files}
    assert sorted(found) == sorted(LINES[package].split())


def test_of_the_planner_only_the_commands_know_the_advisor() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "solver/zbv_solver").rglob("*.py"))
        if path.parent.name != "commands"
        for name in imports(path)
        if name.split(".")[0] == "zbv_models"
    ]
    assert wrong == []


def test_of_the_service_the_worker_knows_only_the_client() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "worker").rglob("*.py"))
        for name in imports(path)
        if name.split(".")[0] == "zbv_service" and not name.startswith("zbv_service.client")
    ]
    assert wrong == []


IMPORTED = {
    "zbv_solver": "numpy pydantic numba",
    "zbv_worker.commands.cli": "torch numba fastapi rich",
    "zbv_service.commands.cli": "fastapi sqlalchemy httpx torch",
    "zbv_service.commands.run": "fastapi sqlalchemy numba torch",
    "zbv_service.client.agent": "fastapi sqlalchemy numba torch",
    "zbv_worker.agent.daemon": "torch numba fastapi",
    "zbv_solver.plans.plan": "numba torch fastapi",
    "zbv_solver.search.run": "torch fastapi ortools jinja2",
    "zbv_solver.commands.layout": "torch transformers",
}
"""Modules in the order in which one process imports them, and what is absent then."""


@pytest.mark.parametrize("imported", [IMPORTED, {"zbv_service.app": "ortools zbv_solver.search.run"}])
def test_importing_stays_light(imported: dict[str, str]) -> None:
    lines = ["import importlib, sys"]
    for module, absent in imported.items():
        lines.append(f"importlib.import_module({module!r})")
        lines.append(f"print({module!r}, [name for name in {absent.split()} if name in sys.modules])")
    command = [sys.executable, "-c", "\n".join(lines)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert made.stdout.splitlines() == [f"{module} []" for module in imported]
