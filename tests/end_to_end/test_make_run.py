"""``make run ARGS=--exit`` from profile to comparison, with fewer steps of a smaller model."""

from __future__ import annotations

import json
import re
import runpy
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.forked_ranks import fork_process, server
from zbv_service.client.tokens import FILE_VARIABLE, TOKEN_VARIABLE
from zbv_worker.host import local_ranks

from examples.demo import run


@pytest.fixture
def process_is_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demonstration handles SIGTERM, and ignores the tokens of other services."""
    for name in (FILE_VARIABLE, TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("process_is_restored")
def test_profile_plan_train_and_compare(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service runs in a new process; the ranks are forked."""
    monkeypatch.setattr(local_ranks, "start_process", fork_process)
    smaller = ["--steps", "3", "--width", "12", "--effort", "quick"]
    for name, value in (("_PROFILE_ROUNDS", 2), ("MICROBATCHES", 4), ("LAYERS_PER_STAGE", 1)):
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run, "MODEL_SIZE", {"heads": 6, "length": 16, "sequences": 1})
    monkeypatch.setattr("sys.argv", ["demo", "--exit", "--port", "0", *smaller, "--folder", str(tmp_path)])
    before = server().running
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("examples.demo", run_name="__main__")
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    for expected in ("zbv", "1F1B", "interleaved 1F1B", "planned", "measured"):
        assert expected in out
    kept = re.search(r"the plan ([0-9a-f]{64}), .* \S+/zbv-service serve --database sqlite:///(\S+)", out)
    assert kept is not None, out
    with closing(sqlite3.connect(kept[2])) as database:
        assert database.execute("SELECT 1 FROM plans WHERE plan_id = ?", [kept[1]]).fetchone()
    outcomes = json.loads((tmp_path / "summary.json").read_text())
    losses = [outcome["run"]["losses"] for outcome in outcomes]
    assert len(losses) == 3
    assert all(len(steps) == 3 and steps[-1] < steps[0] for steps in losses)
    assert not leftovers(tmp_path), "the demonstration left processes behind"
    assert server().running <= before, "and no rank"


def leftovers(folder: Path) -> list[str]:
    """Processes that still name the folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # the process has ended
        if str(folder) in command and "pytest" not in command:
            found.append(command)
    return found
