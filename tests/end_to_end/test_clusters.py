"""The examples for clusters work, with processes of this machine as nodes.

A script calls a ``torchrun`` that asks the test to fork one, so that no process imports torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.agents import MODEL, a_plan
from support.forked_ranks import ForkedProcess, fork_module
from support.paths import ROOT
from support.processes import DEADLINE
from support.trained import train_in_threads
from zbv_service.commands.cli import _parser as service_parser
from zbv_solver import __version__
from zbv_solver.plans.plan import plan_json
from zbv_worker.commands.cli import _parser as worker_parser
from zbv_worker.host.local_ranks import free_port
from zbv_worker.models.gpt import gpt
from zbv_worker.run.options import TrainingOptions

SCRIPT = ROOT / "examples" / "slurm.sbatch"
BIN = Path(sys.executable).parent
BEGUN, ALL = 2, 4
"""Steps: the Slurm job runs the first ones, and the Kubernetes job resumes from its checkpoint."""

SRUN = """#!/bin/bash
nodes=1
while [[ $1 == --* ]]; do
  case $1 in --nodes) nodes=$2; shift 2 ;; --ntasks-per-node) shift 2 ;; *) shift ;; esac
done
pids=()
for ((node = 0; node < nodes; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""
SCONTROL = """#!/bin/bash
if [[ "$*" == "show hostnames node[0-1]" ]]; then printf '127.0.0.1\\nnowhere.invalid\\n'
else echo "$*" >> "$SCONTROL_LOG"; fi
"""
TORCHRUN = """#!/bin/bash
asked=$(mktemp -d "$FORKS/XXXXXX")
printf '%s\\0' "$@" > "$asked/arguments"
env -0 > "$asked/environment"
touch "$asked/ready"
until [[ -s $asked/status ]]; do sleep 0.05; done
cat "$asked/log"
exit "$(cat "$asked/status")"
"""
PRINTS_ITS_ARGUMENTS = '#!/bin/sh\necho "$(basename "$0") $*"\n'


def executables(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def environment(*search_path: Path, **values: object) -> dict[str, str]:
    path = os.pathsep.join([*map(str, search_path), os.environ["PATH"]])
    fixed = {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZBV_", "SLURM_"))}
    return {**kept, **fixed, **{name: str(value) for name, value in values.items()}}


@contextmanager
def started(command: list[str], values: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; it and its child processes end with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=values, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are not in the group
        process.wait(timeout=DEADLINE)


def fork_until_ended(scripts: list[subprocess.Popen[bytes]], forks: Path) -> list[int]:
    """Fork what ``TORCHRUN`` asks for until all scripts have ended; returns their statuses."""
    running: dict[Path, ForkedProcess] = {}
    until = time.monotonic() + DEADLINE
    while any(script.poll() is None for script in scripts):
        assert time.monotonic() < until, "a script takes too long"
        for asked in {path.parent for path in forks.glob("*/ready")} - running.keys():
            words, variables = ((asked / name).read_text() for name in ("arguments", "environment"))
            values = dict(each.split("=", 1) for each in variables.split("\0")[:-1])
            arguments = ["torchrun", *words.split("\0")[:-1]]
            running[asked] = fork_module("support.forking_worker", arguments, values, asked / "log")
        for asked, process in running.items():
            if process.poll() is not None:
                (asked / "status").write_text(str(process.returncode))
        time.sleep(0.05)
    return [script.wait(DEADLINE) for script in scripts]


def losses_in(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(plan_json(a_plan())))
    return path


@pytest.fixture(scope="module")
def right_losses() -> dict[int, float]:
    plan = a_plan()
    trained = train_in_threads(plan.problem, plan.orders, TrainingOptions(), ALL, model=gpt, **MODEL)
    return dict(enumerate(trained.losses))


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    status: int
    output: str
    asked_of_slurm: str
    checkpoints: Path


def sbatch(folder: Path, srun: str = SRUN, **values: object) -> Job:
    """Run the script as Slurm does, with this machine as both nodes."""
    stubs = executables(folder / "bin", srun=srun, scontrol=SCONTROL, torchrun=TORCHRUN)
    log, checkpoints, forks = folder / "scontrol.log", folder / "checkpoints", folder / "forks"
    log.touch()
    forks.mkdir(exist_ok=True)
    job = {"SLURM_JOB_ID": 4711, "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "node[0-1]"}
    given = {**job, "ZBV_CHECKPOINTS": checkpoints, "ZBV_PORT": free_port(), "FORKS": forks, **values}
    output = folder / "job.log"
    with started(["bash", str(SCRIPT)], environment(stubs, BIN, SCONTROL_LOG=log, **given), output) as script:
        (status,) = fork_until_ended([script], forks)
    return Job(status, output.read_text(), log.read_text(), checkpoints)


@pytest.fixture(scope="module")
def trained_by_slurm(plan_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return sbatch(
        tmp_path_factory.mktemp("slurm"),
        ZBV_PLAN_FILE=plan_file,
        ZBV_MODEL_ARGS=json.dumps(MODEL),
        ZBV_STEPS=BEGUN,
        ZBV_CHECKPOINT_EVERY=BEGUN,
        ZBV_BACKEND="gloo",
    )


def test_slurm_trains_on_all_nodes(trained_by_slurm: Job, right_losses: dict[int, float]) -> None:
    assert trained_by_slurm.status == 0, trained_by_slurm.output
    expected = {step: right_losses[step] for step in range(BEGUN)}
    assert losses_in(trained_by_slurm.output) == pytest.approx(expected, abs=1e-4)
    assert trained_by_slurm.asked_of_slurm == ""


def test_slurm_starts_one_launcher_per_node_and_requeues_lost_jobs() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options
    assert options["open-mode"] == "append"


@pytest.mark.parametrize(("restarts", "asked"), [(0, "requeue 4711\n"), (1, "requeue 4711\n"), (2, "")])
def test_a_failed_slurm_job_is_requeued_as_often_as_asked(tmp_path: Path, restarts: int, asked: str) -> None:
    values = {"ZBV_SERVER": "http://planner:8000", "ZBV_PLAN": "ab", "ZBV_RETRIES": 2}
    job = sbatch(tmp_path, "#!/bin/sh\nexit 7\n", SLURM_RESTART_COUNT=restarts, **values)
    assert (job.status, job.asked_of_slurm) == (7, asked)


def test_a_slurm_job_needs_a_plan_from_a_service_or_a_file(tmp_path: Path) -> None:
    said = sbatch(tmp_path, PRINTS_ITS_ARGUMENTS, ZBV_SERVER="http://planner:8000", ZBV_PLAN="ab").output
    assert "zbv-worker run --server http://planner:8000 --plan ab --model" in said
    assert "--master-addr 127.0.0.1 " in said
    job = sbatch(tmp_path, ZBV_PLAN="ab")
    assert (job.status, job.asked_of_slurm) == (2, "")
    assert "set ZBV_PLAN_FILE, or ZBV_SERVER and ZBV_PLAN" in job.output


# --- Kubernetes


def documents(name: str) -> dict[tuple[str, str], Any]:
    """A file's objects, by kind and name."""
    found = yaml.safe_load_all((ROOT / "examples" / name).read_text())
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def pod_specs(name: str) -> Iterator[dict[str, Any]]:
    for (kind, _), document in documents(name).items():
        if kind in ("Job", "Deployment", "DaemonSet"):
            yield document["spec"]["template"]["spec"]


def plain_environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


@pytest.fixture
def job() -> Any:
    return documents("kubernetes.yaml")["Job", "zbv-train"]


def container_of(job: Any) -> Any:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def test_kubernetes_pods_resume_from_the_checkpoint(
    job: Any, plan_file: Path, trained_by_slurm: Job, right_losses: dict[int, float], tmp_path: Path
) -> None:
    container = container_of(job)
    here = {
        "RENDEZVOUS_HOST": "127.0.0.1",
        "RENDEZVOUS_PORT": free_port(),
        "PLAN_FILE": plan_file,
        "MODEL_ARGS": json.dumps(MODEL),
        "STEPS": ALL,
        "BACKEND": "gloo",
        "CHECKPOINTS": shutil.copytree(trained_by_slurm.checkpoints, tmp_path / "checkpoints"),
    }
    defaults = plain_environment(container)
    assert set(here) < set(defaults)
    logs = [tmp_path / f"pod-{index}.log" for index in range(2)]
    stubs, forks = executables(tmp_path / "bin", torchrun=TORCHRUN), tmp_path / "forks"
    forks.mkdir()
    with ExitStack() as stack:
        pods = []
        for index, log in enumerate(logs):
            state = log.with_suffix("")
            state.mkdir()
            own = {"JOB_COMPLETION_INDEX": index, "STATE": state, "HOME": tmp_path, "FORKS": forks}
            values = environment(stubs, BIN, **{**defaults, **here, **own})
            command = [*container["command"], *container["args"]]
            pods.append(stack.enter_context(started(command, values, log)))
        statuses = fork_until_ended(pods, forks)
    said = "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], said
    expected = {step: right_losses[step] for step in range(BEGUN, ALL)}
    assert losses_in(said) == pytest.approx(expected, abs=1e-4)


def test_a_restarted_pod_waits_until_the_others_have_timed_out(job: Any, tmp_path: Path) -> None:
    container = container_of(job)
    stubs = executables(tmp_path / "bin", torchrun=PRINTS_ITS_ARGUMENTS, sleep=PRINTS_ITS_ARGUMENTS)
    values = {**plain_environment(container), "STATE": tmp_path, "JOB_COMPLETION_INDEX": 1}
    command = [*container["command"], *container["args"]]

    def first_words() -> list[str]:
        ran = subprocess.run(
            command, env=environment(stubs, **values), capture_output=True, text=True, timeout=120, check=True
        )
        return [" ".join(line.split()[:2]) for line in ran.stdout.splitlines()]

    assert first_words() == ["torchrun --nnodes"]
    assert first_words() == [f"sleep {values['TIMEOUT']}", "sleep 30", "torchrun --nnodes"]


def test_the_kubernetes_jobs_counts_names_and_mounts_agree(job: Any) -> None:
    spec, pod, container = job["spec"], job["spec"]["template"]["spec"], container_of(job)
    values = plain_environment(container)
    service = documents("kubernetes.yaml")["Service", pod["subdomain"]]
    assert spec["completionMode"] == "Indexed"
    assert int(values["NODES"]) == spec["completions"] == spec["parallelism"]
    assert values["RANKS_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert values["RENDEZVOUS_HOST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["clusterIP"] == "None"  # headless: every pod has a name
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert int(values["RENDEZVOUS_PORT"]) == service["spec"]["ports"][0]["port"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for name in ("PLAN_FILE", "CHECKPOINTS", "STATE"):
        assert any(values[name].startswith(mount) for mount in mounts), name


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-agents.yaml"])
def test_pods_are_limited_unprivileged_and_have_their_volumes(name: str) -> None:
    claims = {claim for kind, claim in documents(name) if kind == "PersistentVolumeClaim"}
    for pod in pod_specs(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "ZBV_… of a Service would be taken for settings"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        wanted = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert wanted <= claims
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["image"].rpartition(":")[2] == __version__, "the tag must be a version"
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)


def test_agents_reach_the_service_and_have_time_to_drain() -> None:
    found = documents("kubernetes-agents.yaml")
    service = found["Service", "zbv-service"]
    (serving,) = found["Deployment", "zbv-service"]["spec"]["template"]["spec"]["containers"]
    agents = found["DaemonSet", "zbv-agent"]["spec"]["template"]["spec"]
    (agent,) = agents["containers"]

    started = service_parser().parse_args(serving["args"])
    assert started.host == "0.0.0.0"
    assert started.port == service["spec"]["ports"][0]["port"]
    labels = found["Deployment", "zbv-service"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()

    options = worker_parser().parse_args(agent["args"])
    assert options.server == f"http://{service['metadata']['name']}:{started.port}"
    assert options.drain_seconds < agents["terminationGracePeriodSeconds"]
    assert options.allow_model
    assert str(options.state_dir) in [mount["mountPath"] for mount in agent["volumeMounts"]]
    assert agents["shareProcessNamespace"] is True
    for probe in ("startupProbe", "livenessProbe"):
        command, *words = agent[probe]["exec"]["command"]
        asked = worker_parser().parse_args(words)
        assert (command, asked.check, asked.state_dir) == ("zbv-worker", True, options.state_dir)
    written = {mount["mountPath"] for container in (serving, agent) for mount in container["volumeMounts"]}
    assert {"/tmp", "/var/lib/zbv"} <= written
    (kernels,) = (entry["value"] for entry in serving["env"] if entry["name"] == "NUMBA_CACHE_DIR")
    assert str(Path(kernels).parent) in written
    for container in (serving, agent):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_service_creates_an_admin_token_and_agents_mount_their_own() -> None:
    found = documents("kubernetes-agents.yaml")
    (making,) = found["Deployment", "zbv-service"]["spec"]["template"]["spec"]["initContainers"]
    made = service_parser().parse_args(making["args"])
    assert (made.scope, made.if_missing) == (["admin"], True)

    agents = found["DaemonSet", "zbv-agent"]["spec"]["template"]["spec"]
    (agent,) = agents["containers"]
    variables = {entry["name"]: entry.get("value") for entry in agent["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    folder, _, _ = variables["ZBV_TOKEN_FILE"].rpartition("/")
    (volume,) = (volume for volume in agents["volumes"] if volume["name"] == mounts[folder])
    assert volume["secret"]["defaultMode"] == 0o440
    commands = (ROOT / "examples" / "kubernetes-agents.yaml").read_text().partition("kind:")[0]
    assert volume["secret"]["secretName"] in commands


def test_the_page_explains_every_setting_of_the_script() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    names = set(re.findall(r"ZBV_\w+", SCRIPT.read_text()))
    assert names
    assert not {name for name in names if f"`{name}`" not in page}
