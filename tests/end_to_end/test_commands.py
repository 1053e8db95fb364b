"""What the commands of all three parts have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import zbv_service.commands.cli
import zbv_solver.commands.cli
import zbv_worker.commands.cli

Main = Callable[[Sequence[str]], int]
PLAN, SERVICE, WORKER = (part.commands.cli.main for part in (zbv_solver, zbv_service, zbv_worker))


@pytest.mark.parametrize(
    ("main", "command", "meant"),
    [
        (PLAN, "plna", "plan"),
        (PLAN, "plan x --efort a", "--effort"),
        (PLAN, "plan x --effort quik", "quick"),
        (PLAN, "estimate --layrs 3", "--layers"),
        (SERVICE, "submot x", "submit"),
        (SERVICE, "serve --prot 1", "--port"),
        (WORKER, "estimte", "estimate"),
        (WORKER, "check --divice=cpu", "--device"),
    ],
)
def test_misspelt_words_get_a_suggestion(
    capsys: pytest.CaptureFixture[str], main: Main, command: str, meant: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert f"Did you mean {meant}?" in capsys.readouterr().err


def test_a_flag_of_another_command_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        PLAN(["check", "x", "--efort", "a"])
    assert "Did you mean" not in capsys.readouterr().err
