"""``make run ARGS=--exit`` from profile to comparison, with fewer steps of a smaller model."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path


def test_profile_plan_train_and_compare(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--exit", "--port", "0"]
    smaller = ["--steps", "4", "--width", "48", "--effort", "quick"]
    made = subprocess.run(
        [*command, *smaller, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    for expected in ("zbv", "1F1B", "interleaved 1F1B", "planned", "measured"):
        assert expected in made.stdout
    kept = re.search(r"the plan ([0-9a-f]{64}), .* zbv-service serve --database sqlite:///(\S+)", made.stdout)
    assert kept is not None, made.stdout
    with closing(sqlite3.connect(kept[2])) as database:
        assert database.execute("SELECT 1 FROM plans WHERE plan_id = ?", [kept[1]]).fetchone()
    outcomes = json.loads((tmp_path / "summary.json").read_text())
    losses = [outcome["run"]["losses"] for outcome in outcomes]
    assert len(losses) == 3
    assert all(len(steps) == 4 and steps[-1] < steps[0] for steps in losses)
    assert not leftovers(tmp_path), "the demonstration left processes behind"


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
