"""How the process of a failed rank ends: reason first, then the abort, in a bounded time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import wait_until
from zbv_worker.errors import InvalidRun, print_error
from zbv_worker.host.local_ranks import LocalRanks, python_command


def end(what: str, folder: Path) -> tuple[int | None, list[str]]:
    """Let a process end; returns its status and what it said."""
    with LocalRanks([python_command("support.ending_rank", what)], folder) as ranks:
        wait_until(lambda: ranks.processes[0].poll() is not None, "the process ends")
        return ranks.processes[0].returncode, ranks.log(0).splitlines()


def test_the_reason_is_recorded_then_published_before_anything_is_aborted(tmp_path: Path) -> None:
    status, said = end("own", tmp_path)
    recorded, published, *others = said
    assert recorded == "recorded wrong"
    expected = {"rank": 1, "reason": "wrong", "is_input_wrong": True}
    assert json.loads(published.removeprefix("published ")) == expected
    assert others == ["reported wrong", "aborted"]
    assert status == 2


def test_a_failure_that_a_peer_caused_is_recorded_at_once_and_again_with_the_cause(tmp_path: Path) -> None:
    status, said = end("peer", tmp_path)
    reason = "it gives no sign of life; its process or host ended, or is stopped"
    assert said[0] == "recorded rank 1 waited at 1F1."
    assert json.loads(said[1].removeprefix("published "))["rank"] == 0
    assert said[2:] == [
        f"recorded rank 0 lost: {reason}. rank 1 waited at 1F1.",
        f"reported rank 0 lost: {reason}. rank 1 waited at 1F1.",
        "aborted",
    ]
    assert status == 1


@pytest.mark.parametrize(
    ("what", "first", "more"),
    [
        ("update", "the update after step 4 within 60 s", ""),
        ("gather", "0F1 within 60 s. With --shard, it may", "the parameters of rank 2, which holds the same"),
    ],
)
def test_a_rank_that_waits_for_a_sum_or_gather_blames_the_silent_rank_and_not_itself(
    what: str, first: str, more: str, tmp_path: Path
) -> None:
    status, said = end(what, tmp_path)
    assert said[0].startswith(f"recorded rank 1: its GPU did not complete {first}")
    assert more in said[0]
    assert json.loads(said[1].removeprefix("published "))["rank"] == 2
    assert said[2].startswith("recorded rank 2 lost: it gives no sign of life")
    assert status == 1


def test_rank_0_serves_the_store_until_the_others_have_read_its_reason(tmp_path: Path) -> None:
    with LocalRanks([python_command("support.ending_rank", "late")] * 2, tmp_path) as ranks:
        wait_until(lambda: all(each.poll() is not None for each in ranks.processes), "the ranks end")
        assert "reported wrong" in ranks.log(0)
        assert "reported rank 0 lost: wrong." in ranks.log(1)


def test_a_complete_run_succeeds_even_if_its_connections_do_not_close(tmp_path: Path) -> None:
    status, said = end("closes", tmp_path)
    (line,) = said
    assert line.startswith("rank 1: the run is complete, but its connections did not close within 1 s. ")
    assert status == 0


def test_a_failure_that_cannot_be_recorded_is_published_all_the_same(tmp_path: Path) -> None:
    status, said = end("unrecorded", tmp_path)
    assert said[0] == "the reason of the failure could not be written: no space left"
    assert json.loads(said[1].removeprefix("published "))["reason"] == "wrong"
    assert said[2:] == ["reported wrong", "aborted"]
    assert status == 2


def test_a_process_whose_abort_hangs_ends_all_the_same(tmp_path: Path) -> None:
    status, said = end("hangs", tmp_path)
    assert "aborted" in said
    assert "Timeout (0:00:01)!" in "\n".join(said)
    assert status == 1


def test_an_error_of_the_worker_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(InvalidRun("no such plan.")) == 2
    assert capsys.readouterr().err == "zbv-worker: no such plan.\n"
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    assert print_error(raised.value) == 1
    assert capsys.readouterr().err.startswith("Traceback")
