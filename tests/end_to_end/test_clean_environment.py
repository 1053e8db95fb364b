"""The commands of the images work with only the wheel installed, outside the repository."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.containers import Container, Dockerfile, compose, containers
from support.paths import ROOT
from support.processes import DEADLINE
from zbv_worker.host.local_ranks import free_port

PACKAGES = [ROOT / "solver" / "zbv_solver", ROOT / "service" / "zbv_service", ROOT / "worker" / "zbv_worker"]
STACK = containers(compose("compose.yaml"))


@dataclass
class Installed:
    """An environment with the wheel; its commands start in an empty folder."""

    commands: Path
    folder: Path
    wheel: Path

    def environment(self, **values: object) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZBV_", "PYTHON"))}
        here = {"PATH": f"{self.commands}{os.pathsep}{kept['PATH']}", "HOME": str(self.folder)}
        # Compiling the kernels for this installation would take twenty seconds.
        return {**kept, **here, "NUMBA_DISABLE_JIT": "1", **{k: str(v) for k, v in values.items()}}

    def run(self, *words: str, **values: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment(**values),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    def say(self, *words: str, **values: object) -> str:
        ran = self.run(*words, **values)
        assert ran.returncode == 0, f"{words}: {ran.stderr}"
        return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("clean")
    offline = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]

    def call(*words: str) -> None:
        subprocess.run(words, check=True, timeout=DEADLINE)

    call(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(place), str(ROOT))
    (wheel,) = place.glob("zbv-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", str(place / "venv"))
    call(*pip, "--python", str(place / "venv"), "install", "--no-compile", *offline, str(wheel))
    # The dependencies come from the environment of the tests. Its editable install of zbv does not, because
    # Python does not read .pth files in folders that a .pth file names.
    site = next((place / "venv").glob("lib/python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    folder = place / "empty"
    folder.mkdir()
    return Installed(place / "venv" / "bin", folder, wheel)


def test_the_wheel_has_every_file_of_the_packages(installed: Installed) -> None:
    packed = set(zipfile.ZipFile(installed.wheel).namelist())
    files = {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".nbi", ".nbc")
    }
    assert any(name.endswith(".j2") for name in files)
    assert files <= packed


def test_code_comes_from_the_wheel(installed: Installed) -> None:
    modules = "zbv_solver, zbv_service, zbv_worker"
    code = f"import {modules}; print(*(m.__file__ for m in ({modules})))"
    found = installed.say("python", "-c", code).split()
    assert len(found) == 3
    assert all(Path(path).is_relative_to(installed.commands.parent) for path in found)


def test_zbv_plans_an_example(installed: Installed) -> None:
    example = str(ROOT / "examples" / "tight-memory.json")
    installed.say("zbv", "plan", example, "--effort", "quick", "--time-limit", "1", "-o", "plan.json")
    assert len(json.loads((installed.folder / "plan.json").read_text())["plan_id"]) == 64


# --- the containers of the compose file, as processes


@dataclass
class Started:
    """A service and an agent, with the command lines of the compose file and addresses of this machine."""

    installed: Installed
    port: int
    token: str
    node: Container
    processes: dict[str, subprocess.Popen[bytes]]

    def healthy(self, words: list[str]) -> bool:
        here = [word.replace(":8000/", f":{self.port}/") for word in words]
        return self.installed.run(*here).returncode == 0

    def get(self, path: str, accept: str = "text/html") -> httpx.Response:
        fields = {"Authorization": f"Bearer {self.token}", "Accept": accept}
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=fields, timeout=DEADLINE)


def until(holds: Callable[[], bool], processes: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        for name, process in processes.items():
            assert process.poll() is None, (logs / f"{name}.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def started(installed: Installed) -> Iterator[Started]:
    port, folder = free_port(), installed.folder
    database = {"ZBV_DATABASE": f"sqlite:///{folder / 'zbv.db'}"}
    token = folder / "token"
    making = [str(token) if word.startswith("/run/zbv/") else word for word in STACK["admin-token"].words]
    installed.say(*making, **database)
    # No test here searches, so no cluster is started.
    serve = [word.replace("dask-scheduler:8786", "127.0.0.1:1") for word in STACK["service"].words]
    proxies = {"ZBV_TRUSTED_PROXIES": STACK["service"].variables["ZBV_TRUSTED_PROXIES"]}
    there = f"--server=http://127.0.0.1:{port}"
    offer = [there if word.startswith("--server=") else word for word in STACK["node-1"].words]
    commands: list[tuple[str, list[str], dict[str, object]]] = [
        ("service", serve, {**database, **proxies, "ZBV_PORT": port}),
        ("agent", offer, {"ZBV_TOKEN_FILE": token}),
    ]
    with ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, words, values in commands:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            environment = installed.environment(**values)
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
            processes[name] = stack.enter_context(process)
            stack.callback(process.kill)
        running = Started(installed, port, token.read_text().strip(), STACK["node-1"], processes)
        until(lambda: answers(port), processes, folder)
        yield running


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_the_service_images_health_check_fails_if_nothing_answers(started: Started) -> None:
    check = Dockerfile.read("Dockerfile.service").last("HEALTHCHECK").words
    assert started.healthy(check)
    nobody = Started(started.installed, free_port(), "", started.node, {})
    assert not nobody.healthy(check)


def test_the_service_serves_pages_styles_metrics_and_its_document(started: Started) -> None:
    page = started.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    style = re.search(r"/static/\w+/zbv\.css", page.text)
    assert style is not None
    assert started.get(style[0]).status_code == 200
    document = json.loads((ROOT / "service" / "openapi.json").read_text())
    assert started.get("/openapi.json", "application/json").json() == document
    assert started.get("/metrics").status_code == 200


def test_the_worker_images_health_check_passes_while_its_agent_works(started: Started) -> None:
    check = started.node.health
    assert check is not None
    folder, listed = started.installed.folder, "/v1/agents"
    until(lambda: bool(started.get(listed, "application/json").json()["agents"]), started.processes, folder)
    until(lambda: started.healthy(check), started.processes, folder)
    assert not [word for word in check if "--state-dir" in word], "uses the default directory"


def test_agent_and_service_exit_with_status_0_after_sigterm(started: Started) -> None:
    for name in ("agent", "service"):
        process = started.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0, (started.installed.folder / f"{name}.log").read_text()
