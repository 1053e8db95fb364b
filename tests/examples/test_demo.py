"""The demonstration's output and errors; `make run ARGS=--exit` runs all of it."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest
from rich.console import Console
from zbv_worker.tracing.report import RunSummary

from examples.demo.example import run_example
from examples.demo.local_service import port_or_free
from examples.demo.run import DemoFailed, ScheduleResult, check_losses, rank_count, table


def outcome(name: str, planned: float, seconds: list[float], losses: list[float]) -> ScheduleResult:
    busy = tuple(2 * second for second in seconds)
    return ScheduleResult(
        name, "aa", planned, 2 * planned, RunSummary("aa", tuple(seconds), busy, tuple(losses))
    )


OUTCOMES = [
    outcome("zbv", 0.5, [9.0, 9.0, 0.6, 0.5, 0.55], [4.0, 3.0, 2.0]),
    outcome("1F1B", 0.8, [9.0, 9.0, 1.1, 1.0, 0.9], [4.0, 3.0, 2.0]),
]


def test_the_table_states_planned_and_measured_times_without_warm_up() -> None:
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    console.print(table(OUTCOMES))
    text = console.export_text()
    for expected in ("500 ms", "550 ms", "1.10", "−45.0\u202f%", "1 s", "1.25"):
        assert expected in text


def test_slower_actions_are_distinguished_from_waiting() -> None:
    assert OUTCOMES[0].slowdown == pytest.approx(1.1)


def test_scatter_of_the_steps_shows_a_busy_machine() -> None:
    calm = outcome("zbv", 1, [9, 9, *[1.0] * 18], [1.0])
    busy = outcome("zbv", 1, [9, 9, *[1.0] * 12, *[2.0] * 6], [1.0])
    assert calm.run.spread() == 0
    assert busy.run.spread() == 1


def test_losses_must_agree_and_decrease() -> None:
    assert check_losses(OUTCOMES) == 0
    with pytest.raises(DemoFailed, match=r"differ by 50\.0\u202f%"):
        check_losses([OUTCOMES[0], outcome("1F1B", 1, [1], [4.0, 4.5, 2.0])])
    with pytest.raises(DemoFailed, match="did not decrease"):
        check_losses([outcome("zbv", 1, [1], [4.0, 3.0, 4.5])])


SCRIPT = """
import os, sys
_, _, steps, _, saved = sys.argv
print("noise")
if steps == "80":
    print("resumed after step 40")
if os.environ["RANK"] == "1":
    print("step", steps)
print("zbv: planned")
"""


def test_the_example_resumes_and_what_all_ranks_say_is_shown_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shown = run_example(script, tmp_path / "example")
    saved = tmp_path / "example" / "checkpoints"
    assert shown == [
        f"{script} --steps 40 --checkpoints {saved}",
        "  zbv: planned",
        "  step 40",
        f"{script} --steps 80 --checkpoints {saved}",
        "  resumed after step 40",
        "  zbv: planned",
        "  step 80",
    ]


def test_the_demonstration_uses_two_to_four_ranks() -> None:
    assert 2 <= rank_count() <= 4


def test_a_port_in_use_is_replaced_by_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert port_or_free(taken.getsockname()[1]) == 0
    assert port_or_free(0) == 0
