"""What the test suite does when a test hangs or kills its process: it names the test, and goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with this suite's settings."""
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "durations.json").write_text("{}")
    return tmp_path


def run(suite: Path, *flags: str) -> str:
    settings = ("-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}", "--import-mode=importlib", "-v")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *flags, str(suite)],
        cwd=suite,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    return ran.stdout


def test_all_tests_behind_one_that_kills_its_process_run_once(suite: Path) -> None:
    names = [f"test_{number}.py" for number in range(4)]
    for name in names:
        (suite / name).write_text("def test_one(): pass\n")
    # The last share, so that only shares of the dead process are left.
    (suite / "test_fatal.py").write_text(
        "import os\ndef test_one(): pass\ndef test_fatal(): os._exit(3)\ndef test_three(): pass\n"
    )
    out = run(suite, "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert f"1 failed, {len(names) + 2} passed" in out
    assert re.findall(r"crashed while running '(.*)'", out)[0].endswith("test_fatal.py::test_fatal")


def test_a_hanging_test_ends_with_its_fixtures_and_the_systems_handler_of_ctrl_c_is_an_error(
    suite: Path,
) -> None:
    conftest = suite / "conftest.py"
    text = conftest.read_text()
    assert "_ASYNC_SECONDS = 360.0" in text
    conftest.write_text(text.replace("_ASYNC_SECONDS = 360.0", "_ASYNC_SECONDS = 0.1"))
    (suite / "test_hanging.py").write_text(
        "import asyncio, pytest\n"
        "pytestmark = pytest.mark.anyio\n"
        "@pytest.fixture\n"
        "def anyio_backend(): return 'asyncio'\n"
        "@pytest.fixture\n"
        "async def service():\n"
        "    yield\n"
        "    print('the service', 'ends')\n"
        "async def test_hanging(service): await asyncio.Event().wait()\n"
    )
    (suite / "test_signal.py").write_text(
        "import signal\ndef test_handler(): signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    )
    out = run(suite)
    assert "1 failed, 1 passed, 1 error" in out
    assert "the service ends" in out
    assert "SIGINT now has the system's handler" in out
