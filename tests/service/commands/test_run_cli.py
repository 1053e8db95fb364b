"""``zbv-service run``: its requests, its messages, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from support.orders import random_orders
from support.problems import uniform, uniform_document
from zbv_service import client
from zbv_service.client import Client
from zbv_service.commands import run as run_command
from zbv_service.commands.cli import main
from zbv_solver.plans.plan import plan_json
from zbv_solver.search.assemble import make_plan

PLAN = ["--plan", "e" * 64]
NEEDED = ["--model", "a.b:c", "--nodes", "2", "--steps", "5"]
REFUSAL = {"status": 422, "title": "T", "detail": "D", "errors": [{"pointer": "/nodes", "detail": "wrong"}]}

TIMES = ((0, 2.5, 4.5), (1, 1.0, 3.0), (4, 1.25, None))
STEPS = [{"step": step, "seconds": seconds, "loss": loss} for step, seconds, loss in TIMES]


class Service:
    """Answers like a service. The run is running when it is first read, and later in its last state."""

    def __init__(self, last: str = "succeeded") -> None:
        self.last = last
        self.requests: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        self.looks = 0
        self.refusal: dict[str, Any] | None = None
        self.refused_with = 422
        self.refuses_plans = False
        self.on_look: Callable[[int], None] = lambda _count: None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST":
            self.requests.append((path, json.loads(request.content or b"null")))
        if request.method == "POST" and path == "/v1/runs":
            self.keys.add(request.headers["idempotency-key"])
        if path == "/v1/plans" and not self.refuses_plans:
            return httpx.Response(201, json={"plan_id": "f" * 64})
        if self.refusal is not None:
            return httpx.Response(self.refused_with, json=self.refusal)
        if path.endswith("/events"):
            return httpx.Response(200, json={"events": self._events(int(request.url.params["after"]))})
        if path.endswith("/steps"):
            return httpx.Response(200, json={"steps": STEPS})
        if request.method == "GET":
            self.looks += 1
            self.on_look(self.looks)
        return httpx.Response(200, json=self._run())

    def _run(self) -> dict[str, Any]:
        state = "running" if self.looks < 2 else self.last
        members = [{"ranks": [{"rank": rank, "step": step} for rank, step in enumerate((4, 3, None))]}]
        return {"id": "r1", "state": state, "plan_id": None, "error": None, "members": members, "steps": 5}

    def _events(self, after: int) -> list[dict[str, Any]]:
        at = "2030-01-01T00:00:00Z"
        told = {1: ("starting", "on one"), 2: (self.last, "")}
        return [
            {"id": number, "at": at, "kind": kind, "detail": detail}
            for number, (kind, detail) in told.items()
            if after < number <= self.looks
        ]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    found = Service()

    class Connected(Client):
        def __init__(self, address: str) -> None:
            super().__init__(address, transport=httpx.MockTransport(found), retries=0)

    monkeypatch.setattr(client, "Client", Connected)
    for name in ("POLL_SECONDS", "PROGRESS_SECONDS"):
        monkeypatch.setattr(run_command, name, 0.0)
    return found


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is empty."""
    monkeypatch.chdir(tmp_path)


def write(document: Any) -> str:
    """Write a file in the working directory; its name."""
    Path("file.json").write_text(json.dumps(document))
    return "file.json"


def test_a_stored_plan_is_run_and_followed(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *PLAN, *NEEDED]) == 0
    ((path, body),) = service.requests
    assert (path, len(service.keys)) == ("/v1/runs", 1)
    model = {"factory": "a.b:c", "arguments": {}, "seed": 0}
    given = {"plan_id": "e" * 64, "model": model, "nodes": 2, "steps": 5}
    assert body == {**given, "options": {}, "search_options": None}
    printed = capsys.readouterr()
    assert printed.out == "r1\n"
    lines = printed.err.splitlines()
    assert lines[0] == "run r1 (http://127.0.0.1:8000/runs/r1)"
    starting, progress, succeeded, curve = lines[1:]
    assert [line.split(" ", 1)[1] for line in (starting, succeeded)] == ["starting: on one", "succeeded"]
    assert progress == "last reported step 3 of 5; step 4: 1.25 s"
    assert curve == "step 0: loss 4.5, 2.5 s; step 4: 1.25 s"


@pytest.mark.usefixtures("in_folder")
def test_a_plan_file_is_imported_and_a_problem_file_is_planned(service: Service) -> None:
    problem = uniform(2, 3)
    plan = plan_json(make_plan(problem, random_orders(problem, Random(1)), method="random"))
    assert main(["run", write(plan), *NEEDED]) == 0
    (imported, submitted) = service.requests
    assert imported == ("/v1/plans", plan)
    assert (submitted[1]["plan_id"], "problem" in submitted[1]) == ("f" * 64, False)

    service.looks = 0
    document = uniform_document(2, 3)
    assert main(["run", write(document), *NEEDED, "--effort", "quick", "--seed", "4"]) == 0
    body = service.requests[-1][1]
    assert (body["plan_id"], body["problem"]) == (None, document)
    assert body["search_options"] == {"effort": "quick", "seed": 4}


def test_every_flag_sets_the_option_of_the_same_name(service: Service) -> None:
    flags = (
        "--data-parallel 2 --shard --precision bfloat16 --clip-norm 1.5 --evaluate-every 7 --retries 0 "
        "--replan ask --replan-threshold 0.1 --checkpoint-dir /shared --checkpoint-every 9 --threads 3 "
        "--timeout 4 --startup-timeout 5 --compile --no-main-gradients --checkpoint-sync --accumulate 8 "
        '--backend nccl --model-args {"layers":2} --model-seed 6'
    )
    assert main(["run", *PLAN, *NEEDED, *flags.split()]) == 0
    body = service.requests[0][1]
    assert body["model"] == {"factory": "a.b:c", "arguments": {"layers": 2}, "seed": 6}
    assert body["options"] == {
        **{"data_parallel": 2, "shard": True, "precision": "bfloat16", "clip_norm": 1.5, "retries": 0},
        **{"evaluate_every": 7, "replan": "ask", "replan_threshold": 0.1, "startup_timeout": 5.0},
        **{"checkpoint": {"directory": "/shared", "every": 9, "sync": True}, "compile": True},
        **{"main_gradients": False, "threads": 3, "timeout": 4.0, "accumulate": 8, "backend": "nccl"},
    }


def test_a_script_gets_the_arguments_after_two_dashes(service: Service) -> None:
    flags = ["--plan", "f" * 64, "--script", "train.py", "--nodes", "2", "--threads", "3"]
    assert main(["run", *flags, "--", "--threads", "4", "--", "x"]) == 0
    ((_, sent),) = service.requests
    script = {"path": str(Path.cwd() / "train.py"), "arguments": ["--threads", "4", "--", "x"]}
    assert (sent["script"], sent["options"]) == (script, {"threads": 3})
    assert not {"model", "steps"}.intersection(sent)


MODEL = ["--model", "a:b", "--nodes", "1"]
SCRIPT = ["--script", "a.py", "--nodes", "1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*PLAN, *MODEL], "--model needs the number of training steps; give --steps"),
        ([*PLAN, *MODEL, "--steps", "1", "--", "x"], "found arguments after --, which are for a script"),
        ([*PLAN, *SCRIPT, "--model-seed", "1"], "--model-seed is for a model"),
        ([*PLAN, *SCRIPT, "--model", "a:b"], "not allowed with argument"),
        ([*PLAN, "--nodes", "1"], "one of the arguments --model --script is required"),
        (NEEDED, "found neither of a file and --plan"),
        ([*PLAN, "x.json", *NEEDED], "found both of a file and --plan"),
        ([*PLAN, *NEEDED, "--checkpoint-every", "9"], "--checkpoint-every without --checkpoint-dir"),
        ([*PLAN, *NEEDED, "--checkpoint-sync"], "--checkpoint-sync without --checkpoint-dir"),
        ([*PLAN, *NEEDED, "--checkpoint-dir", "ck"], "found 'ck'; must be an absolute path that all nodes"),
        ([*PLAN, *NEEDED, "--model-args", "{"], "--model-args: found '{', which is not JSON"),
        ([*PLAN, *NEEDED, "--model-args", "[]"], "--model-args: found '[]'; must be a JSON object"),
        ([*PLAN, *NEEDED, "--model-args", "[1e999]"], "--model-args: found '[1e999]', which is not JSON"),
        ([*PLAN, *NEEDED, "--timeout", "nan"], "--timeout: found 'nan'; must be a finite number"),
        (["infinite.json", *NEEDED], "infinite.json contains a number that is not finite"),
    ],
)
@pytest.mark.usefixtures("in_folder")
def test_wrong_input_exits_with_2_names_the_flag_and_sends_nothing(
    service: Service, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    Path("infinite.json").write_text('{"pp_degree": -Infinity}')
    try:
        status: object = main(["run", *flags])
    except SystemExit as ended:  # by argparse
        status = ended.code
    assert (status, service.requests) == (2, [])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("last", ["failed", "cancelled", 401, 403, 429])
def test_a_run_that_does_not_succeed_or_is_not_accepted_exits_with_1(
    service: Service, capsys: pytest.CaptureFixture[str], last: str | int
) -> None:
    if isinstance(last, str):
        service.last = last
    else:
        service.refusal, service.refused_with = {"title": "T", "detail": "not you"}, last
    assert main(["run", *PLAN, *NEEDED]) == 1
    assert isinstance(last, str) or "not you" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pointer", "named"),
    [
        ("/nodes", "--nodes"),
        ("/model/arguments/layers", "--model-args: /layers"),
        ("/options/clip_norm", "--clip-norm"),
        ("/options/checkpoint/every", "--checkpoint-every"),
        ("/search_options/time_limit", "--time-limit"),
        ("/problem/costs/forward", "file.json: /costs/forward"),
        ("/nodes_and_more", "/nodes_and_more"),
        ("/ranks/0", "file.json: /ranks/0"),
    ],
)
@pytest.mark.usefixtures("in_folder")
def test_a_refusal_exits_with_2_and_names_the_flag_or_file(
    service: Service, capsys: pytest.CaptureFixture[str], pointer: str, named: str
) -> None:
    service.refusal = {**REFUSAL, "errors": [{"pointer": pointer, "detail": "wrong"}]}
    service.refuses_plans = pointer == "/ranks/0"
    file = write({"ranks": []} if service.refuses_plans else uniform_document(2, 3))
    assert main(["run", file, *NEEDED]) == 2
    assert capsys.readouterr().err == f"zbv-service: {named}: wrong\n"


def interrupted(*looks: int, then: Callable[[], None] = lambda: None) -> Callable[[int], None]:
    """Ctrl-C at these looks of the command at its run."""

    def interrupt(count: int) -> None:
        if count in looks:
            then()
            raise KeyboardInterrupt

    return interrupt


def test_an_interrupt_leaves_the_run_and_prints_how_to_cancel_it(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.on_look = interrupted(1)
    assert main(["run", *PLAN, *NEEDED]) == 130
    said = capsys.readouterr().err
    assert said.endswith("zbv-service cancel r1 --server http://127.0.0.1:8000\n")
    assert [path for path, _ in service.requests] == ["/v1/runs"]


def test_with_cancel_on_interrupt_the_first_interrupt_cancels_the_run_and_the_second_leaves_it(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.last = "cancelled"
    for looks, status in (((1,), 1), ((1, 2), 130)):
        service.on_look, service.looks = interrupted(*looks), 0
        service.requests.clear()
        assert main(["run", *PLAN, *NEEDED, "--cancel-on-interrupt"]) == status
        assert [path for path, _ in service.requests] == ["/v1/runs", "/v1/runs/r1/cancel"]
    assert "run r1 continues" in capsys.readouterr().err


def test_a_refused_cancellation_is_reported(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        service.refusal = {**REFUSAL, "detail": "no more"}

    service.on_look = interrupted(1, then=refuse)
    assert main(["run", *PLAN, *NEEDED, "--cancel-on-interrupt"]) == 1
    said = capsys.readouterr().err
    assert "no more" in said
    assert "The run continues without the service" in said


def test_the_command_waits_a_while_for_a_service_that_does_not_answer(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, absences, status, message in (
        (60.0, 1, 0, "Waiting for it; the run continues meanwhile."),
        (0.0, 99, 1, "no answer from"),
    ):

        def away(count: int, absences: int = absences) -> None:
            if count <= absences:
                raise httpx.ConnectError("refused")

        service.on_look, service.looks = away, 0
        monkeypatch.setattr(run_command, "AWAY_SECONDS", seconds)
        assert main(["run", *PLAN, *NEEDED]) == status
        assert message in capsys.readouterr().err


def test_after_a_lost_answer_the_message_says_that_the_run_may_have_started(
    service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(_service: Service, _request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("cut off")

    monkeypatch.setattr(Service, "__call__", cut_off)
    assert main(["run", *PLAN, *NEEDED]) == 1
    said = capsys.readouterr().err
    assert "may nevertheless have started the run" in said
    assert "http://127.0.0.1:8000/runs before" in said


def test_a_missing_part_of_the_installation_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr("zbv_service.commands.settings.declared", without)
    assert main(["serve"]) == 2
    assert "found no module 'uvicorn'; this command needs the service. Install it" in capsys.readouterr().err
