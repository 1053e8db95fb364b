"""Output files: opened before the work, and replaced completely or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from zbv_solver.documents.files import output, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a content and a mode that its owner chose."""
    made = tmp_path / "plan.json"
    made.write_text("old")
    made.chmod(0o640)
    return made


def test_a_file_that_cannot_be_written_fails_before_the_work(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught, output(missing):
        pytest.fail("the work began")
    assert caught.value.filename == str(missing)
    with pytest.raises(IsADirectoryError), output(tmp_path):
        pytest.fail("the work began")


def test_an_error_leaves_the_file_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(KeyboardInterrupt), output(path):
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("private", "partial_mode", "mode"), [(False, None, 0o640), (True, 0o600, 0o600)])
def test_the_content_is_replaced_at_once(
    path: Path, private: bool, partial_mode: int | None, mode: int
) -> None:
    with output(path, private=private) as write_text:
        (partial,) = (each for each in path.parent.iterdir() if each != path)
        assert partial_mode in (None, stat.S_IMODE(partial.stat().st_mode))
        assert path.read_text() == "old"
        write_text("first")
        write_text("second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_links_devices_and_pipes_stay_what_they_are(path: Path) -> None:
    link = path.with_name("link.json")
    link.symlink_to(path)
    write(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reader, writer = os.pipe()
    write(f"/dev/fd/{writer}", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    os.close(writer)
