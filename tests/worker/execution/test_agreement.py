"""Ranks that were started differently refuse to run, and name the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.thread_transport import ThreadHub, ThreadTransport
from zbv_solver.plans.channels import Channel, Transfer
from zbv_worker.errors import ChannelTimeout, Disagreement
from zbv_worker.execution.agreement import Statement, agree
from zbv_worker.transport.channels import ChannelKey

SENT = Channel(0, 1, (Transfer("activation", 0, 0), Transfer("gradient", 2, 0)))


def statement(rank: int, ranks: int = 3) -> Statement:
    channels = (SENT,) if rank < 2 else ()
    return Statement("aaaa", rank, ranks, ranks, "model", "gloo", 20, channels)


def outcomes(statements: list[Statement]) -> list[tuple[ChannelKey, ...] | str]:
    def outcome(transport: ThreadTransport) -> tuple[ChannelKey, ...] | str:
        try:
            return agree(transport, statements[transport.rank], timeout=60)
        except Disagreement as error:
            return str(error)

    return ThreadHub(len(statements)).run(outcome)


def test_equal_statements_give_every_rank_all_channels() -> None:
    assert outcomes([statement(rank) for rank in range(3)]) == [(ChannelKey(0, 1),)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_id": "bbbb"}, "differ in plan id (ranks 0, 2: aaaa; rank 1: bbbb)"),
        ({"model": "other"}, "differ in model (ranks 0, 2: model; rank 1: other)"),
        ({"steps": 21}, "differ in steps (ranks 0, 2: 20; rank 1: 21)"),
        ({"pp_rank": 0}, "rank 1 has the action list of rank 0"),
        ({"channels": ()}, "ranks 0 and 1 expect different tensors on channel 0→1"),
        (
            {"channels": (replace(SENT, transfers=SENT.transfers[::-1]),)},
            "ranks 0 and 1 expect different tensors",
        ),
    ],
)
def test_all_ranks_refuse_and_name_the_differing_ranks(change: dict[str, object], message: str) -> None:
    statements = [statement(rank) for rank in range(3)]
    statements[1] = replace(statements[1], **change)  # type: ignore[arg-type]  # fields by name
    found = outcomes(statements)
    assert len(set(found)) == 1
    assert message in str(found[0])


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    statements = [replace(statement(rank), pp_degree=4) for rank in range(3)]
    assert "found 3 ranks; the plan is for 4" in str(outcomes(statements)[0])


def test_an_absent_rank_is_named_after_the_timeout() -> None:
    hub = ThreadHub(2)
    with pytest.raises(ChannelTimeout, match=r"rank 0 waited 0\.1 s .*ranks \[1\] did not take part"):
        agree(hub.transport(0), statement(0, ranks=2), timeout=0.1)
