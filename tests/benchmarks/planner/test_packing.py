"""The benchmark of packings: other methods as their papers say, its rows and its target."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import batch_document
from zbv_solver.packing.arrange import Packer
from zbv_solver.packing.batch import parse_batch
from zbv_solver.packing.packing import packer_of
from zbv_solver.search.options import SearchOptions

from benchmarks.planner.lengths import LAWS, PackingInstance
from benchmarks.planner.packing import HEADER, PACKERS, packing_table


def one_replica(lengths: list[int], max_tokens: int) -> Packer:
    return packer_of(parse_batch(batch_document(lengths, max_tokens=max_tokens, replicas=1, limit=None)))


@pytest.mark.parametrize("method", PACKERS.values(), ids=PACKERS)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 64), min_size=3, max_size=24), replicas=st.integers(1, 3))
def test_every_method_packs_every_sequence_once(method: object, lengths: list[int], replicas: int) -> None:
    assert callable(method)
    packing = method(packer_of(parse_batch(batch_document(lengths, replicas=replicas))))
    contents = [microbatch for replica in packing for microbatch in replica]
    assert sorted(index for microbatch in contents for index in microbatch) == [*range(len(lengths))]
    assert len(packing) == replicas
    assert all(packing)
    assert all(sum(lengths[index] for index in microbatch) <= 64 for microbatch in contents)


def test_every_method_packs_as_its_paper_says() -> None:
    lengths = [30, 40, 30, 20, 4, 60]
    packer = one_replica(lengths, 64)
    packed = {name: [list(contents) for contents in method(packer)[0]] for name, method in PACKERS.items()}
    assert packed["first-fit"] == [[0, 2, 4], [1, 3], [5]]
    assert packed["equal-tokens"] == [[0], [1], [2, 3, 4], [5]]
    # The longest first: 60, 40, 30 and 30 open the four microbatches; 20 joins a 30, and 4 the other.
    assert sorted(map(sorted, packed["balanced-work"])) == [[0, 4], [1], [2, 3], [5]]
    ordered = sorted(([lengths[at] for at in contents] for contents in packed["dynamic-program"]), key=max)
    assert [length for contents in ordered for length in contents] == sorted(lengths)


def test_the_dynamic_program_stays_small_for_many_short_sequences() -> None:
    assert max(map(len, PACKERS["dynamic-program"](one_replica([1] * 1100, 1100))[0])) <= 512


def test_a_row_compares_the_step_with_all_other_methods() -> None:
    lines: list[str] = []
    batch = PackingInstance(LAWS["tail"], 2, 2, 8, 1.0, max_tokens=4096)
    (finding,) = packing_table([batch], SearchOptions("quick"), lines.append)
    header, row = lines
    assert header == HEADER
    values = row.split()
    assert len(values) == len(HEADER.split())
    assert values[0] == batch.name
    assert all(float(gain.rstrip("*")) >= 0 for gain in values[5:9])
    assert finding.target is not None
    assert finding.value == pytest.approx(float(values[9].rstrip("*")), abs=0.06)
