"""The structure of a value: what it takes apart it puts together, here and at a peer."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zbv_worker.errors import ModelError
from zbv_worker.values.structure import FLOATS, Structure, TensorSpec, bytes_of, map_tensors, tensors_of


class Point(NamedTuple):
    x: Any
    y: Any


DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.randint(0, 2, draw(shapes)).to(dtype)
    return tensor.requires_grad_(draw(st.booleans())) if dtype in FLOATS else tensor


constants = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
values = st.recursive(
    tensors() | constants,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_a_value_is_built_from_its_tensors(value: Any) -> None:
    structure = Structure.of(value)
    built = structure.build(structure.tensors(value))
    assert Structure.of(built) == structure
    assert [id(tensor) for tensor in tensors_of(built)] == [id(tensor) for tensor in tensors_of(value)]
    assert bytes_of(value) == sum(spec.nbytes for spec in structure.specs)


@given(values)
def test_a_structure_travels_as_json(value: Any) -> None:
    structure = Structure.of(value)
    assert Structure.parse(structure.json()) == structure


@given(values, values)
def test_different_values_have_different_structures(one: Any, other: Any) -> None:
    """Judged by another way to write values down."""
    same = _written(one) == _written(other)
    assert (Structure.of(one) == Structure.of(other)) == same


def _written(value: Any, *, is_nested: bool = False) -> str:
    if isinstance(value, Tensor):
        flag = value.requires_grad if is_nested or value.dtype not in FLOATS else True
        return f"T{tuple(value.shape)}{value.dtype}{flag}"
    if isinstance(value, dict):
        return f"d({[(key, _written(each, is_nested=True)) for key, each in value.items()]})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({[_written(each, is_nested=True) for each in value]})"
    return f"{type(value).__name__}:{value!r}"


def test_one_floating_tensor_has_a_gradient_and_others_only_if_they_require_it() -> None:
    x = torch.zeros(2)
    assert Structure.of(x).has_gradient == (True,)
    assert Structure.of((x,)).has_gradient == (False,)
    assert Structure.of({"a": x.clone().requires_grad_(), "b": x}).has_gradient == (True, False)
    assert Structure.of(torch.zeros(2, dtype=torch.int64)).has_gradient == (False,)


def test_other_mappings_become_dicts() -> None:
    structure = Structure.of(OrderedDict(b=1, a=2))
    assert structure == Structure.of({"b": 1, "a": 2})
    assert type(structure.build([])) is dict


def test_a_structure_is_shown_to_people() -> None:
    value = (
        {"h": torch.zeros(2, 3, requires_grad=True), "n": 3},
        [None, torch.zeros(1).bool()],
        Point(1, "a"),
    )
    said = "({h: [2, 3] float32 with gradient, n: 3}, [None, [1] bool], Point(1, 'a'))"
    assert str(Structure.of(value)) == said
    assert str(Structure.of(torch.zeros(2))) == "[2] float32"


def a_local_tuple() -> Any:
    class Local(NamedTuple):
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, [object()]), r"found a object at \[1\]\[0\] between stages; must be tensors and constants"),
        ({"a": {1: 2}}, r"found a dict with the key 1 at \['a'\] between stages; keys must be str"),
        (torch.eye(2).to_sparse(), r"layout torch.sparse_coo between stages; must be dense"),
        (a_local_tuple(), "which a peer cannot find by its name"),
    ],
)
def test_what_cannot_travel_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Structure.of(value)


VALID = json.loads(Structure.of({"a": (torch.zeros(2), Point(1, 2))}).json())


def _changed(path: tuple[Any, ...], to: Any) -> bytes:
    document = json.loads(json.dumps(VALID))
    *parents, last = path
    inner = document
    for step in parents:
        inner = inner[step]
    inner[last] = to
    return json.dumps(document).encode()


NAMED = ("tree", "children", 0, "children", 1, "named")


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"[" * 5000,
        _changed(("tensors", 0, "dtype"), "float31"),
        _changed(("tensors", 0, "dtype"), "__name__"),
        _changed(("tensors", 0, "shape"), [-1]),
        _changed(("tensors", 0, "shape"), [1 << 40, 1 << 40]),
        _changed(("tensors",), []),
        _changed(("tree", "keys"), ["a", "b"]),
        _changed(("tree", "kind"), "set"),
        _changed(NAMED, "os:system"),
        _changed(NAMED, "builtins:tuple"),
        _changed(NAMED, "not_imported:Point"),
        _changed(("more",), 1),
    ],
)
def test_an_invalid_header_is_refused(document: bytes) -> None:
    with pytest.raises(ModelError, match="header of an activation is invalid"):
        Structure.parse(document)


def test_the_valid_header_is_accepted() -> None:
    assert Structure.parse(json.dumps(VALID).encode()).specs == (TensorSpec((2,), torch.float32),)


def test_nan_equals_nan_and_one_does_not_equal_true() -> None:
    assert Structure.of(math.nan) == Structure.of(math.nan)
    assert len({Structure.of(each) for each in (1, True, 1.0, "1")}) == 4


def test_tensors_are_replaced_in_new_containers() -> None:
    value = {"a": [torch.zeros(1), 3], "b": Point(torch.ones(1), None)}
    found = map_tensors(lambda tensor: tensor + 1, value)
    assert found == {"a": [torch.ones(1), 3], "b": Point(torch.full((1,), 2.0), None)}
    assert found["a"] is not value["a"]
