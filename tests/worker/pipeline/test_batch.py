"""A batch is split along the first dimension of every tensor, wherever it is."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.batch import Batch, microbatches_of, split_batch


class Pair(NamedTuple):
    tokens: Tensor
    name: str


@given(count=st.integers(1, 5), rows=st.integers(1, 4), width=st.integers(0, 3))
def test_the_microbatches_together_are_the_batch(count: int, rows: int, width: int) -> None:
    inputs = torch.arange(count * rows * width).reshape(count * rows, width)
    targets = [torch.arange(count * rows)]
    found = split_batch(inputs, targets, {"mask": inputs > 2}, count)
    assert len(found) == count
    assert all(len(each.input) == rows for each in found)
    assert torch.equal(torch.cat([each.input for each in found]), inputs)
    assert torch.equal(torch.cat([each.target[0] for each in found]), targets[0])
    masks = [each.keywords["mask"] for each in found]
    if count > 1 and (width == count * rows or rows == 1):  # it may belong to the whole batch
        assert all(torch.equal(mask.whole, inputs > 2) for mask in masks)
        masks = [mask.part for mask in masks]
    assert torch.equal(torch.cat(masks), inputs > 2)


def test_containers_stay_as_they_are_and_constants_go_to_every_microbatch() -> None:
    scale = torch.tensor(2.0)
    inputs = {"pair": Pair(torch.arange(4), "name"), "more": (None, 7, scale)}
    first, second = split_batch(inputs, None, {}, 2)
    assert type(first.input["pair"]) is Pair
    assert first.input["pair"].tokens.tolist() == [0, 1]
    assert second.input["pair"].name == "name"
    assert second.input["more"] == (None, 7, scale)
    assert first.target is None


def test_microbatches_share_the_memory_of_the_batch() -> None:
    inputs = torch.zeros(4, 2)
    split_batch(inputs, None, {}, 2)[1].input.fill_(1.0)
    assert inputs.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


@dataclass
class Rows:
    tokens: Tensor


@pytest.mark.parametrize("whole", [UserDict(x=torch.zeros(4)), Rows(torch.zeros(4)), torch.zeros(4).numpy()])
def test_what_would_reach_every_microbatch_unsplit_is_refused(whole: Any) -> None:
    with pytest.raises(InvalidRun, match=rf"inputs\['a'\]: found a {type(whole).__name__}; a batch is split"):
        split_batch({"a": whole}, torch.zeros(4), {}, 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(6), None, {}), "inputs has 6 rows; must be a multiple of the plan's 4 microbatches"),
        ((torch.zeros(0), None, {}), "inputs has 0 rows; must be a multiple"),
        ((torch.zeros(8), torch.zeros(4), {}), "inputs has 8 rows and targets has 4"),
        (
            ([torch.zeros(8)], None, {"mask": torch.zeros(3, 3)}),
            r"inputs\[0\] has 8 rows and keywords\['mask",
        ),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(InvalidRun, match=message):
        split_batch(*batch, count=4)


def test_given_microbatches_are_used_as_they_are() -> None:
    given = [Microbatch(1, 2, {"mask": 3}), (4,), (5, 6)]
    found = microbatches_of(Batch(None, None, {}, given), 3)
    assert [(each.input, each.target, dict(each.keywords)) for each in found] == [
        (1, 2, {"mask": 3}),
        (4, None, {}),
        (5, 6, {}),
    ]


@pytest.mark.parametrize(
    ("inputs", "keywords", "given", "message"),
    [
        (None, {}, [(1, 2)], "found 1 microbatches; the plan has 2"),
        (None, {}, [(1, 2), 3], r"microbatches\[1\]: found a int"),
        (torch.zeros(2), {}, [(1, 2), (3, 4)], "found a batch and microbatches="),
        (None, {"mask": 1}, [(1, 2), (3, 4)], "found a batch and microbatches="),
    ],
)
def test_wrong_microbatches_are_refused(inputs: Any, keywords: Any, given: Any, message: str) -> None:
    with pytest.raises(InvalidRun, match=message):
        microbatches_of(Batch(inputs, None, keywords, given), 2)
