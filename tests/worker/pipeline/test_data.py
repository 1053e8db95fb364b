"""What each rank receives of a batch that only one rank of its pipeline has; ranks are threads."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
import torch
from support.plans import unit_problem
from support.selfcheck import random_orders
from support.thread_pipeline import ConnectedHub
from support.thread_transport import ThreadTransport
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.failures.failures import Failures
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.connecting import PipelineOptions
from zbv_worker.pipeline.data import SharedData
from zbv_worker.pipeline.preparing import Prepared
from zbv_worker.stage.layers import Keywords

MASK = Keywords(frozenset({"x", "mask"}), frozenset({"mask"}))
EMBEDDED = Keywords(frozenset({"x"}))


class World:
    """Ranks in two dimensions: ``p`` positions × ``replicas``."""

    def __init__(self, p: int, replicas: int, data_rank: int, keywords: list[Keywords], kind: str = "v"):
        problem = unit_problem(p, 4, kind)
        orders = random_orders(problem, Random(0))
        hub, ranks = ConnectedHub(p, replicas), range(p * replicas)
        self.sent = hub.sent_bytes
        options = PipelineOptions(
            "plan", None, None, None, None, "float32", False, 60.0, 60.0, None, data_rank=data_rank
        )
        self._shared = []
        for rank in ranks:
            transport: Any = hub.transport(rank)
            plan = RankPlan.of("0" * 64, problem, orders, hub.layout.pp_rank(rank))
            prepared = Prepared(plan, {}, has_loss=False, keywords_by_rank=keywords)
            self._shared.append(SharedData(options, prepared, transport, Failures(transport, 60, 60)))
        self._run = hub.run

    def exchange(self, batches: dict[int, list[Microbatch]]) -> list[Any]:
        """What the ranks get, or their errors."""

        def run(transport: ThreadTransport) -> Any:
            rank = transport.rank
            try:
                return self._shared[rank].exchange(rank in batches, lambda: batches[rank], equal=False)
            except InvalidRun as error:
                return str(error)

        return self._run(run)


def microbatches(seed: int = 0) -> list[Microbatch]:
    numbers = torch.Generator().manual_seed(seed)
    return [
        Microbatch(
            {"tokens": torch.randint(9, (2, 3), generator=numbers), "kind": 3},
            (torch.rand(3, 2, generator=numbers).T, None),
            {"mask": torch.rand(2, generator=numbers).bfloat16()},
        )
        for _ in range(4)
    ]


def flat(found: list[Microbatch]) -> list[Any]:
    return [tuple(each) for each in found]


def test_a_rank_receives_what_its_layers_need_and_nothing_else() -> None:
    batch = microbatches()
    first, second, third = World(3, 1, 1, [MASK, MASK, EMBEDDED], "single").exchange({1: batch})
    torch.testing.assert_close(flat(first), [(each.input, None, each.keywords) for each in batch])
    assert second is batch
    torch.testing.assert_close(flat(third), [(None, each.target, {}) for each in batch])


def test_in_a_v_only_keywords_travel_and_their_structure_only_once() -> None:
    world = World(2, 1, 0, [EMBEDDED, MASK])
    for seed in (1, 2):
        batch = microbatches(seed)
        _, other = world.exchange({0: batch})
        torch.testing.assert_close(flat(other), [(None, None, each.keywords) for each in batch])
    _, _, payload, announced, again = world.sent[0]
    assert (announced, again) == (8 * 5, payload)  # a length, and the shapes of four microbatches
    assert payload == 4 * 16  # four masks, each aligned


def test_every_replica_has_a_data_rank() -> None:
    world = World(2, 2, 1, [MASK] * 4)
    given = {rank: microbatches(rank) for rank in (2, 3)}  # the second rank of each pipeline
    for replica, found in enumerate(world.exchange(given)[:2]):
        torch.testing.assert_close(flat(found), flat(given[2 + replica]))


def test_a_batch_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    world = World(2, 1, 0, [MASK, MASK])
    wrong = [Microbatch(None, None, {"mask": cast("Any", {1, 2})})] * 4
    mine, other = world.exchange({0: wrong})
    assert mine.startswith("the batch cannot be sent to other ranks: found a set")
    assert other == f"rank 0: {mine}"
    assert len(world.exchange({0: microbatches()})[1]) == 4


@pytest.mark.parametrize("count", [0, 4])
def test_constants_need_no_tensors(count: int) -> None:
    batch = [Microbatch(None, None, {"mask": index}) for index in range(count)]
    assert World(2, 1, 0, [MASK, MASK]).exchange({0: batch})[1] == batch
