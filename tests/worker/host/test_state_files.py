"""Old folders of an agent are removed; running ones, and those of others, stay."""

from __future__ import annotations

import os
from pathlib import Path

from zbv_worker.host.state_files import SPEC, progress_file, remove_old, write_json

DAY = 86_400.0
NOW = 1_000_000_000.0
RUN, OTHER = "a" * 32, "b" * 32


def generation(state: Path, run: str, number: str, days: float) -> Path:
    """A generation's folder without changes for this many days."""
    folder = state / run / number
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "stdout.log").write_text("text")
    write_json(folder / SPEC, {})
    age(folder, days)
    return folder


def age(folder: Path, days: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (NOW - days * DAY,) * 2)


def test_old_generations_and_empty_runs_are_removed(tmp_path: Path) -> None:
    old, young = generation(tmp_path, RUN, "0", 8), generation(tmp_path, RUN, "1", 6)
    alone = generation(tmp_path, OTHER, "12", 7.1)
    assert remove_old(tmp_path, 7, NOW) == [old, alone]
    assert young.exists()
    assert not old.exists()
    assert not alone.parent.exists()
    assert remove_old(tmp_path, 7, NOW) == []


def test_one_file_that_is_written_keeps_its_generation(tmp_path: Path) -> None:
    folder = generation(tmp_path, RUN, "0", 30)
    write_json(progress_file(folder, 0), {})
    os.utime(progress_file(folder, 0), (NOW, NOW))
    os.utime(folder, (NOW - 30 * DAY,) * 2)
    assert remove_old(tmp_path, 7, NOW) == []


def test_folders_of_other_programs_are_kept(tmp_path: Path) -> None:
    for run, number in (("my-data", "0"), (RUN, "notes")):
        generation(tmp_path, run, number, 30)
    bare = tmp_path / OTHER / "0"
    bare.mkdir(parents=True)
    age(tmp_path, 30)
    assert remove_old(tmp_path, 7, NOW) == []
    assert bare.exists()
    assert remove_old(tmp_path / "absent", 7, NOW) == []
