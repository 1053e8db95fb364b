"""The names and commands in the Dockerfiles and the compose file are right; no container engine is needed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker
from support.containers import DOCKER, Dockerfile, compose, containers
from support.paths import ROOT
from zbv_service.api.routers.agents import MAX_WAIT
from zbv_service.client.tokens import FILE_VARIABLE
from zbv_service.commands.cli import _parser as service_parser
from zbv_service.commands.settings import settings_of
from zbv_service.database.events import KEEP_ALIVE_SECONDS
from zbv_service.errors import NOT_READY, error_document
from zbv_service.settings import Settings
from zbv_worker.commands.cli import _parser as worker_parser

IMAGES = ["Dockerfile.service", "Dockerfile.worker"]
STACKS = [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STACK = containers(compose("compose.yaml"))
OURS = [name for name, container in STACK.items() if container.image is not None]
LASTING = [name for name, container in STACK.items() if container.service["restart"] == "unless-stopped"]
SECRETS = {"database-secret", "admin-token", "agent-token"}
A_TAG = re.compile(r"[a-z0-9./-]+:(?P<tag>[a-zA-Z0-9][a-zA-Z0-9._-]*)(@sha256:[0-9a-f]{64})?")


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> Dockerfile:
    return Dockerfile.read(request.param)


# --- images


def test_base_images_are_pinned_and_only_the_environment_leaves_the_build_stage(image: Dockerfile) -> None:
    ((argument, base),) = image.arguments.items()
    found = A_TAG.fullmatch(base)
    assert found is not None
    assert re.match(r"\d+\.\d+\.\d+", found["tag"]), "the tag must name a release, or its image can change"
    build, final = image.stages
    assert [found.text for found in image.all("FROM")] == [f"${{{argument}}} AS build", f"${{{argument}}}"]
    assert [found.text for found in final if found.name == "COPY"] == ["--from=build /opt/zbv /opt/zbv"]
    assert not [found.text for found in final if re.search(r"\b(pip|apt|apt-get|curl|gcc)\b", found.text)]
    assert any("pip install" in found.text for found in build)


def test_base_images_are_new_enough() -> None:
    python = Dockerfile.read("Dockerfile.service").arguments["PYTHON"]
    torch = Dockerfile.read("Dockerfile.worker").arguments["BASE"]
    interpreter = version(re.findall(r":([\d.]+)-", python)[0])
    assert interpreter >= version(PROJECT["requires-python"].removeprefix(">="))
    paths = re.findall(r"/lib/python([\d.]+)/", (DOCKER / "Dockerfile.service").read_text())
    assert {version(path) for path in paths} == {interpreter[:2]}
    (needed,) = (entry for entry in PROJECT["optional-dependencies"]["worker"] if entry.startswith("torch"))
    assert version(re.findall(r":([\d.]+)-", torch)[0]) >= version(needed.removeprefix("torch>="))


def test_the_build_context_is_exactly_the_files_that_images_copy(image: Dockerfile) -> None:
    assert not [source for source in image.sources if not (ROOT / source).exists()]
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == image.sources
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt"}
    assert needed <= image.sources
    assert image.variables.keys() <= {"PATH", "PYTHONUNBUFFERED", "NUMBA_CACHE_DIR", "HOME"}


def test_images_install_existing_extras_in_the_tested_versions(image: Dockerfile) -> None:
    (installed,) = (found.text for found in image.all("RUN") if "pip install" in found.text)
    (extras,) = re.findall(r"install '\.\[([a-z,]+)\]'", installed)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (environment,) = (found.text for found in image.stages[0] if found.name == "ENV")
    (workdir,) = (found.text for found in image.stages[0] if found.name == "WORKDIR")
    assert f"PIP_CONSTRAINT={workdir}/constraints.txt" in environment.split()


def test_images_run_as_a_numbered_user_that_is_not_root_and_write_into_volumes(image: Dockerfile) -> None:
    user = image.last("USER").text
    assert user == "999:999"  # a number, so that Kubernetes can see that it is not root
    (made,) = (found.text for found in image.all("RUN") if "useradd" in found.text)
    assert f"--uid {user.partition(':')[0]} " in made
    volumes = image.last("VOLUME").words
    assert image.last("WORKDIR").text in volumes
    assert image.variables.get("NUMBA_CACHE_DIR", volumes[0]) in volumes
    assert f"--home-dir {image.last('WORKDIR').text} " in made
    order = [found.name for found in image.stages[-1]]
    assert order.index("VOLUME") > max(i for i, name in enumerate(order) if name == "RUN"), "would be lost"


def test_images_run_modules_that_exist(image: Dockerfile) -> None:
    modules = [name for found in image.all("RUN") for name in re.findall(r"python -m (\S+)", found.text)]
    assert modules
    assert all(find_spec(name) for name in modules)


def test_the_services_image_serves_and_the_workers_is_asked_how_it_is() -> None:
    image = Dockerfile.read("Dockerfile.service")
    parsed = parse(*image.last("ENTRYPOINT").words, *image.last("CMD").words)
    assert (parsed.host, int(image.last("EXPOSE").text)) == ("0.0.0.0", Settings.model_fields["port"].default)
    assert f"127.0.0.1:{Settings.model_fields['port'].default}/healthz" in image.last("HEALTHCHECK").text
    image = Dockerfile.read("Dockerfile.worker")
    assert parse(*image.last("HEALTHCHECK").words).check is True
    assert image.last("ENTRYPOINT").words == ["zbv-worker"]


# --- the compose file


def parse(command: str, *words: str) -> argparse.Namespace:
    """Parse a command line with the parser of its command, which fails on unknown options."""
    return {"zbv-service": service_parser, "zbv-worker": worker_parser}[command]().parse_args(words)


def test_compose_files_match_the_compose_schema() -> None:
    check = [str(Path(sys.executable).parent / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    files = [str(DOCKER / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    ran = subprocess.run([*check, *files], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("names", STACKS)
def test_programs_accept_the_command_lines_of_their_containers(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = set()
    for container in containers(compose(*names)).values():
        match container.words:
            case ["zbv-service" | "zbv-worker", *_]:
                parsed = parse(*container.words)
                with monkeypatch.context() as environment:
                    for name, value in container.variables.items():
                        environment.setenv(name, value)
                    if container.words[0] == "zbv-service":
                        assert settings_of(parsed).database.startswith("postgresql://")
            case ["dask", "scheduler", *rest]:
                assert dask_scheduler.make_context("scheduler", rest).params["port"] == "8786"
            case ["dask", "worker", *rest]:
                assert dask_worker.make_context("worker", rest).params["scheduler"]
            case ["sh", "-euc", script]:
                subprocess.run(["sh", "-n", "-c", script], check=True, timeout=60)
            case []:
                assert container.image is None
                continue
            case other:
                raise AssertionError(f"{container.name}: unknown command {other}")
        checked.add(container.words[0])
    assert checked == {"zbv-service", "zbv-worker", "dask", "sh"}


def test_every_zbv_variable_is_a_setting() -> None:
    known = {f"ZBV_{name.upper()}" for name in Settings.model_fields}
    known |= {"ZBV_SERVER", "ZBV_TOKEN", FILE_VARIABLE}
    texts = [path.read_text() for path in DOCKER.iterdir()]
    found = {name for text in texts for name in re.findall(r"\bZBV_[A-Z_]+", text)}
    assert found
    assert found <= known


def test_the_compose_file_needs_no_variables() -> None:
    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            for entry in value:
                yield from strings(entry)
        elif isinstance(value, str):
            yield value

    assert not [text for text in strings(compose("compose.yaml")) if "$" in text.replace("$$", "")]


@pytest.mark.parametrize("name", STACK)
def test_containers_are_pinned_limited_and_unprivileged(name: str) -> None:
    service = STACK[name].service
    found = A_TAG.fullmatch(service["image"])
    assert found is not None
    if STACK[name].image is None:
        assert re.match(r"\d+\.\d+", found["tag"])
    else:
        assert found["tag"] == "local", "built here, never pulled"
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True  # collects the processes of processes that ended
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert STACK[name].user.partition(":")[0] not in ("", "0", "root")


@pytest.mark.parametrize("names", STACKS)
def test_every_volume_network_and_file_name_is_defined_and_used(names: tuple[str, ...]) -> None:
    document = compose(*names)
    for container in containers(document).values():
        named = {source for source, _ in container.mounts.values() if not source.startswith("./")}
        files = {source for source, _ in container.mounts.values() if source.startswith("./")}
        assert named <= document["volumes"].keys()
        assert all((DOCKER / file).is_file() for file in files)
        assert container.networks <= document["networks"].keys()
        assert container.networks or container.service["network_mode"] == "none"
    used = {source for container in STACK.values() for source, _ in container.mounts.values()}
    assert document["volumes"].keys() <= used
    assert document["networks"].keys() == {network for found in STACK.values() for network in found.networks}


def test_containers_depend_on_each_other_without_cycles_and_only_on_health_or_completion() -> None:
    waits = {name: found.service.get("depends_on", {}) for name, found in STACK.items()}
    list(TopologicalSorter(waits).static_order())
    for name, conditions in waits.items():
        for other, wait in conditions.items():
            if wait["condition"] == "service_healthy":
                assert STACK[other].health is not None, f"{name} waits for the health of {other}"
            else:
                assert wait["condition"] == "service_completed_successfully"
                assert STACK[other].service["restart"] == "no"
    assert all(STACK[name].health is not None for name in LASTING)


def test_addresses_name_reachable_containers_that_listen_on_the_port() -> None:
    listening = {"service": 8000, "balancer": 8000, "postgres": 5432, "dask-scheduler": 8786}
    checked = set()
    for container in STACK.values():
        texts = [*container.words, *container.variables.values()]
        if container.name == "balancer":
            texts = re.findall(r"server-template \S+ \d+ (\S+)", (DOCKER / "haproxy.cfg").read_text())
            texts = [f"http://{text}" for text in texts]
        for host, port in re.findall(r"://(?:\w+@)?([\w.-]+)(?::(\d+))?", " ".join(texts)):
            if host != "127.0.0.1":
                assert int(port or 5432) == listening[host]
                assert STACK[host].networks & container.networks, f"{container.name} cannot reach {host}"
                checked.add(host)
    assert checked == listening.keys()
    assert "bind :8000" in (DOCKER / "haproxy.cfg").read_text()


def test_only_the_balancer_is_reached_from_outside_and_only_from_this_machine() -> None:
    document = compose("compose.yaml")
    assert {name for name, found in STACK.items() if "ports" in found.service} == {"balancer"}
    assert STACK["balancer"].service["ports"] == ["127.0.0.1:8000:8000"]
    open_networks = {name for name, found in document["networks"].items() if not found.get("internal")}
    assert open_networks == {"edge"}
    members = {
        name: {found.name for found in STACK.values() if name in found.networks}
        for name in document["networks"]
    }
    assert members["edge"] == {"balancer"}
    assert members["nodes"] == {"balancer", "node-1", "node-2"}
    assert members["database"] == {"postgres", "service", "admin-token", "agent-token"}
    assert members["searches"] == {"dask-scheduler", "dask-worker", "service"}
    assert members["front"] == {"balancer", "service"}


def test_each_secret_has_one_writer_and_only_its_readers() -> None:
    holders = {
        secret: {
            name: can_write
            for name, found in STACK.items()
            for source, can_write in found.mounts.values()
            if source == secret
        }
        for secret in SECRETS
    }
    assert holders == {
        "database-secret": {
            **{"password": True, "postgres": False, "service": False},
            **{"admin-token": False, "agent-token": False},
        },
        "admin-token": {"admin-token": True, "service": False},
        "agent-token": {"agent-token": True, "node-1": False, "node-2": False},
    }
    users = {STACK[name].user for who in holders.values() for name in who}
    assert users == {"999:999"}, "only one user can read the secrets"


@pytest.mark.parametrize("name", OURS)
def test_images_own_the_folders_that_their_containers_mount(name: str) -> None:
    container = STACK[name]
    assert container.image is not None
    folders = " ".join(found.text for found in container.image.all("RUN"))
    for path, (source, _) in container.mounts.items():
        assert f" {path}" in folders, f"no image creates {path}: root would own the volume {source}"
    for variable in (FILE_VARIABLE, "PGPASSFILE"):
        if variable in container.variables:
            assert str(Path(container.variables[variable]).parent) in container.mounts
    written = [word for flag, word in pairwise(container.words) if flag == "--output"]
    written += [word.partition("=")[2] for word in container.words if word.startswith("--local-directory=")]
    for path in written:
        assert {path, str(Path(path).parent)} & container.writable


def test_each_token_has_exactly_the_scope_that_its_holders_need() -> None:
    for name, scopes in {"admin-token": ["admin"], "agent-token": ["agent"]}.items():
        parsed = parse(*STACK[name].words)
        assert (parsed.scope, parsed.if_missing) == (scopes, True)
        readers = [found for found in STACK.values() if parsed.output == found.variables.get(FILE_VARIABLE)]
        assert readers


def test_the_password_is_created_once_and_private(tmp_path: Path) -> None:
    *shell, script = STACK["password"].words
    (folder,) = STACK["password"].mounts
    (found,) = re.findall(r"cd (\S+)", script)
    assert found == folder

    def start() -> tuple[str, str]:
        subprocess.run([*shell, script.replace(folder, str(tmp_path))], check=True, timeout=60)
        return (tmp_path / "password").read_text().strip(), (tmp_path / "pgpass").read_text().strip()

    password, entry = start()
    assert re.fullmatch(r"[0-9a-f]{64}", password)
    postgres = STACK["postgres"].variables
    assert entry == f"postgres:5432:{postgres['POSTGRES_DB']}:{postgres['POSTGRES_USER']}:{password}"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert start() == (password, entry)
    assert STACK["service"].variables["PGPASSFILE"] == f"{folder}/pgpass"
    assert postgres["POSTGRES_PASSWORD_FILE"] == f"{folder}/password"


def test_grace_periods_exceed_the_time_to_shut_down() -> None:
    def seconds(name: str) -> float:
        return float(STACK[name].service["stop_grace_period"].removesuffix("s"))

    shutdown = float(Settings.model_fields["shutdown_seconds"].default)
    assert seconds("service") > 2 * shutdown
    assert seconds("dask-worker") > shutdown
    for node in ("node-1", "node-2"):
        assert seconds(node) > parse(*STACK[node].words).drain_seconds
    hard_stop = re.findall(r"hard-stop-after (\d+)s", (DOCKER / "haproxy.cfg").read_text())
    assert float(hard_stop[0]) < seconds("balancer")


def test_the_balancers_timeouts_exceed_long_polls_and_keep_alives() -> None:
    text = (DOCKER / "haproxy.cfg").read_text()
    waits = {name: float(value) for name, value in re.findall(r"timeout (client|server) (\d+)s", text)}
    assert waits.keys() == {"client", "server"}
    assert min(waits.values()) > max(MAX_WAIT, KEEP_ALIVE_SECONDS)
    assert "uri /healthz " in text


def test_the_balancer_removes_forwarding_headers_of_clients() -> None:
    """Services trust the forwarded address: a client that reached one could forge it to guess more tokens."""
    assert STACK["service"].variables["ZBV_TRUSTED_PROXIES"] == "*"
    lines = [line.strip() for line in (DOCKER / "haproxy.cfg").read_text().splitlines()]
    assert {"http-request del-header X-Forwarded- -m beg", "http-request del-header Forwarded"} <= {*lines}


def test_the_balancers_503_is_the_services_problem_document() -> None:
    (text,) = re.findall(r"http-error status 503 .* string '(.*)'", (DOCKER / "haproxy.cfg").read_text())
    body, kind = json.loads(text), NOT_READY
    expected = error_document(kind, body["detail"])
    assert body == expected


def test_each_node_has_its_own_gpu_and_one_slot() -> None:
    stack = containers(compose("compose.yaml", "compose.gpu.yaml"))
    reserved = []
    for name in ("node-1", "node-2"):
        (device,) = stack[name].service["deploy"]["resources"]["reservations"]["devices"]
        assert parse(*stack[name].words).slots == len(device["device_ids"])
        reserved += device["device_ids"]
    assert len(reserved) == len(set(reserved))


def test_documented_compose_commands_name_existing_files_and_services() -> None:
    pages = [ROOT / "docs" / name for name in ("clusters.md", "containers.md")]
    texts = [path.read_text() for path in (*DOCKER.iterdir(), *pages)]
    files = {name for text in texts for name in re.findall(r" -f (\S+)", text)}
    assert {f"docker/{name}" for name in ("compose.yaml", "compose.gpu.yaml", *IMAGES)} <= files
    assert not [
        name for name in files if name.startswith(("docker/", "examples/")) and not (ROOT / name).is_file()
    ]
    services = {name for text in texts for name in re.findall(r"\bexec (?:-T )?([\w-]+) zbv-", text)}
    assert services <= STACK.keys()


def test_programs_accept_the_documented_commands() -> None:
    text = (ROOT / "docs" / "containers.md").read_text().replace("\\\n", " ")
    tried = [shlex.split(line) for line in re.findall(r"exec (?:-T )?service ([^<#\n]+)", text)]
    assert {tuple(words[:2]) for words in tried} == {("zbv-service", c) for c in ("token", "submit", "run")}
    for words in tried:
        parse(*words)
    (words,) = (words for words in tried if "--checkpoint-dir" in words)
    assert str(Path(words[words.index("--checkpoint-dir") + 1]).parent) in STACK["node-1"].mounts
