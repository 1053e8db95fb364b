"""Every lower bound has a lemma in bounds/PROOFS.md, and every lemma's function exists and names it."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from zbv_models.fixed_orders import relaxation
from zbv_solver import bounds
from zbv_solver.packing import step_costs
from zbv_solver.partition import balance, floors, least_memory

TEXT = (Path(bounds.__file__).parent / "PROOFS.md").read_text()
FOUND = re.findall(r"^### Lemma (\d+)([\s\S]*?)(?=^##|\Z)", TEXT, re.MULTILINE)
LEMMAS = {int(number): body for number, body in FOUND}
NAMES = [module.name for module in pkgutil.iter_modules(bounds.__path__, f"{bounds.__name__}.")]
MODULES = [*map(pkgutil.resolve_name, NAMES), bounds, balance, step_costs, floors, least_memory, relaxation]


def computed_by(number: int) -> list[str]:
    """Names of the functions and classes that compute what a lemma states."""
    line = re.search(r"^Computed by: (.+)$", LEMMAS[number], re.MULTILINE)
    return re.findall(r"`([\w.]+)`", line[1]) if line else []


def test_lemmas_are_numbered_in_order_and_proved() -> None:
    assert list(LEMMAS) == list(range(1, len(LEMMAS) + 1))
    assert all("\nProof. " in body and "∎" in body for body in LEMMAS.values())


@pytest.mark.parametrize("number", LEMMAS)
def test_what_computes_a_lemma_exists_and_names_it(number: int) -> None:
    assert computed_by(number)
    for name in computed_by(number):
        value = pkgutil.resolve_name(name)
        if inspect.getmodule(value) in MODULES:
            sentences = re.findall(r"Lemmas? [^.]+", inspect.getdoc(value) or "")
            assert str(number) in re.findall(r"\d+", " ".join(sentences)), name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_function_has_a_lemma(module: object) -> None:
    """Compiled ones, too."""
    public = {
        f"{value.__module__}.{name}"
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and not inspect.isclass(value)
    }
    own = {name for name in public if name.startswith(f"{vars(module)['__name__']}.")}
    assert own <= {name for number in LEMMAS for name in computed_by(number)}
