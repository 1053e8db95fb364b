"""Output files: opened before the work, and replaced completely or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from zbv_solver.documents.files import output, write


def test_a_file_that_cannot_be_written_fails_before_the_work(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught, output(path):
        pytest.fail("the work began")
    assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError), output(tmp_path):
        pytest.fail("the work began")


def test_an_error_during_the_work_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), output(path):
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_replaced_and_the_mode_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    with output(path) as write_text:
        assert path.read_text() == "old"
        write_text("first")
        write_text("second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_stays_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_devices_and_pipes_are_written_to_directly() -> None:
    write("/dev/null", "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reader, writer = os.pipe()
    try:
        write(f"/dev/fd/{writer}", "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    with output(path, private=True) as write_text:
        (partial,) = (each for each in tmp_path.iterdir() if each != path)
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        write_text("secret")
    assert path.read_text() == "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
