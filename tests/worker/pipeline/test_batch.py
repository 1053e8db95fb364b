"""A batch is split into microbatches: by rows, or, if it is packed, where its sequences end."""

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
from zbv_worker.stage.layers import Keywords


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
        (([torch.zeros(8)], None, {"mask": torch.zeros(3, 3)}), r"\[0\] has 8 rows and keywords\['mask"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(InvalidRun, match=message):
        split_batch(*batch, count=4)


def test_given_microbatches_are_used_as_they_are() -> None:
    given = [Microbatch(1, 2, {"mask": 3}), (4,), (5, 6)]
    found = microbatches_of(Batch(None, None, {}, given), 3)
    given = [(each.input, each.target, dict(each.keywords)) for each in found]
    assert given == [(1, 2, {"mask": 3}), (4, None, {}), (5, 6, {})]


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


TAKEN = Keywords(frozenset({"x", "cu_seqlens", "mask"}), frozenset({"cu_seqlens", "mask"}))


def split(
    tokens: Any,
    cu_seqlens: Any,
    sequences: Any = None,
    *,
    count: int = 2,
    stated: list[int] | None = None,
    taken: Keywords = TAKEN,
    **keywords: Any,
) -> list[Microbatch]:
    return microbatches_of(Batch(tokens, None, keywords, None, cu_seqlens, sequences), count, stated, taken)


@given(lengths=st.lists(st.integers(1, 5), min_size=2, max_size=8), data=st.data())
def test_every_microbatch_has_its_sequences(lengths: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    sequences = [list(order[at::count]) for at in range(count)]
    sequence_of = torch.cat([torch.full((length,), at) for at, length in enumerate(lengths)])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    found = split(sequence_of, offsets, sequences, count=count, mask=sequence_of[None] + 100)
    for microbatch, own in zip(found, sequences, strict=True):
        expected = torch.cat([torch.full((lengths[at],), at) for at in own])
        assert torch.equal(microbatch.input, expected)
        assert torch.equal(microbatch.keywords["mask"], expected[None] + 100)
        cu_seqlens = microbatch.keywords["cu_seqlens"]
        assert cu_seqlens.tolist() == [0, *torch.tensor([lengths[at] for at in own]).cumsum(0).tolist()]
        assert cu_seqlens.dtype == torch.int32


def test_layers_get_the_keywords_that_they_name() -> None:
    every = frozenset({"cu_seqlens", "max_seqlen", "position_ids"})
    for taken, names in (
        (Keywords(every, every), every),
        (Keywords(every, frozenset({"position_ids"})), {"position_ids"}),
        (Keywords(takes_any=True), {"cu_seqlens", "max_seqlen"}),
    ):
        first, _ = split(torch.zeros(6), [0, 2, 5, 6], [[0, 1], [2]], taken=taken)
        assert set(first.keywords) == names
        expected = {"cu_seqlens": [0, 2, 5], "max_seqlen": 3, "position_ids": [[0, 1, 0, 1, 2]]}
        for name, value in first.keywords.items():
            assert (value.tolist() if isinstance(value, Tensor) else value) == expected[name]


def test_neighbouring_sequences_are_views_of_the_batch() -> None:
    tokens = torch.zeros(6)
    split(tokens, [0, 2, 5, 6], [[0, 1], [2]])[0].input.fill_(1.0)
    assert tokens.tolist() == [1] * 5 + [0]


def test_without_indices_sequences_follow_the_tokens_of_the_plan() -> None:
    first, second = split(torch.arange(6), [0, 2, 5, 6], stated=[5, 1])
    assert (first.input.tolist(), second.input.tolist()) == ([0, 1, 2, 3, 4], [5])
    assert first.keywords["cu_seqlens"].tolist() == [0, 2, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [0]}, r"cu_seqlens: found \[0\]; must be the offsets"),
        ({"cu_seqlens": [1, 2, 6]}, "must be the offsets"),
        ({"cu_seqlens": [0, 3, 3, 6]}, "must be the offsets"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "must be the offsets"),
        ({"cu_seqlens": 3}, "found 3; must be the offsets"),
        ({"sequences": [[0], [1]]}, "found 2 indices for 3 sequences"),
        ({"sequences": [[0, 1], [1]]}, "found 3 indices for 3 sequences; every sequence must"),
        ({"sequences": [[0, 1, 2], []]}, "no microbatch may be empty"),
        ({"sequences": [[0, 1, 2]]}, "found 1 microbatches; the plan has 2"),
        ({"sequences": None}, r"found cu_seqlens without sequences="),
        ({"sequences": None, "stated": [3, 3]}, "no sequence ends at token 3, where microbatch 0"),
        ({"sequences": None, "stated": [2, 3]}, "the batch has 6 tokens, but the plan's feature"),
        ({"tokens": torch.zeros(5)}, r"inputs has the shape \[5\]; by cu_seqlens the batch has 6 tokens"),
        ({"mask": torch.zeros(2, 6)}, r"keywords\['mask'\] has the shape \[2, 6\]"),
        ({"taken": Keywords(frozenset({"x"}))}, "no layer takes cu_seqlens, max_seqlen or position_ids"),
        ({"cu_seqlens": None}, "found sequences= without cu_seqlens="),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"tokens": torch.zeros(6), "cu_seqlens": [0, 2, 5, 6], "sequences": [[0, 1], [2]], **changes}
    with pytest.raises(InvalidRun, match=message):
        split(**arguments)
