"""Every lower bound has a lemma in bounds/PROOFS.md, and every lemma's function exists and names it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from zbv_models.fixed_orders import count_model, relaxation
from zbv_solver import bounds
from zbv_solver.packing import floor
from zbv_solver.partition import balance, floors, least_memory

TEXT = (Path(bounds.__file__).parent / "PROOFS.md").read_text()
LEMMAS = {
    int(number): body
    for number, body in re.findall(r"^### Lemma (\d+)([\s\S]*?)(?=^##|\Z)", TEXT, re.MULTILINE)
}
MODULES = [
    bounds,
    *(
        importlib.import_module(f"{bounds.__name__}.{each.name}")
        for each in pkgutil.iter_modules(bounds.__path__)
    ),
    balance,
    floor,
    floors,
    least_memory,
    count_model,
    relaxation,
]


def computed_by(number: int) -> list[str]:
    """Names of the functions and classes that compute what a lemma states."""
    line = re.search(r"^Computed by: (.+)$", LEMMAS[number], re.MULTILINE)
    return re.findall(r"`([\w.]+)`", line[1]) if line else []


def found(name: str) -> Any:
    """The object of a dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise ModuleNotFoundError(name)


def public_functions(module: ModuleType) -> list[str]:
    """Names of the functions that a module defines for others, compiled ones included."""
    return [
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and not inspect.isclass(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def test_lemmas_are_numbered_in_order_and_proved() -> None:
    assert list(LEMMAS) == list(range(1, len(LEMMAS) + 1))
    for number, body in LEMMAS.items():
        assert "\nProof. " in body, number
        assert "∎" in body, number


@pytest.mark.parametrize("number", LEMMAS)
def test_what_computes_a_lemma_exists_and_names_it(number: int) -> None:
    names = computed_by(number)
    assert names, number
    for name in names:
        value = found(name)
        if inspect.getmodule(value) in MODULES:
            sentences = re.findall(r"Lemmas? [^.]+", inspect.getdoc(value) or "")
            named = {int(digits) for sentence in sentences for digits in re.findall(r"\d+", sentence)}
            assert number in named, name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_function_has_a_lemma(module: ModuleType) -> None:
    listed = {name for number in LEMMAS for name in computed_by(number)}
    assert set(public_functions(module)) <= listed
