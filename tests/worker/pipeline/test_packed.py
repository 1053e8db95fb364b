"""A packed batch is split where its sequences end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.batch import Batch, microbatches_of
from zbv_worker.stage.layers import Keywords

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
        (
            {"sequences": [[0, 1], [1]]},
            "found 3 indices for 3 sequences; every sequence must",
        ),
        ({"sequences": [[0, 1, 2], []]}, "no microbatch may be empty"),
        ({"sequences": [[0, 1, 2]]}, "found 1 microbatches; the plan has 2"),
        ({"sequences": None}, r"found cu_seqlens without sequences="),
        (
            {"sequences": None, "stated": [3, 3]},
            "no sequence ends at token 3, where microbatch 0",
        ),
        (
            {"sequences": None, "stated": [2, 3]},
            "the batch has 6 tokens, but the plan's feature",
        ),
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
