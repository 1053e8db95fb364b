"""`zbv-service searches`, `runs`, `follow` and `cancel`: what a service does, and how to stop it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live import Command
from support.serving import DEADLINE, MODEL, PLAN, PROBLEM
from zbv_service import client as client_module
from zbv_service.client import Client, Run, Search
from zbv_service.commands.cli import main

COMMANDS = [
    *(["searches"], ["runs"], ["follow", "a"], ["cancel", "a"], ["submit", "a.json"]),
    ["layout", "--preset", "llama-3.1-8b", "--cluster", "a.json"],
    ["run", "a.json", "--model", "a.b:c", "--nodes", "2", "--steps", "5"],
]
IN_US = {**PROBLEM, "units": {"time": "us"}}


def begun(client: Client, seed: int, name: str | None = None) -> Search:
    """A search that has found a plan and goes on."""
    search = client.submit(IN_US, {"seed": seed}, name=name)
    return next(
        found for _ in client.events(search.id) if (found := client.search(search.id)).objective is not None
    )


def waiting_run(client: Client, name: str | None = None) -> Run:
    """A run that waits for agents."""
    return client.submit_run(client.import_plan(PLAN), MODEL, nodes=2, steps=7, name=name)


def test_lists_are_json_in_a_pipe_newest_first_and_filtered(command: Command, client: Client) -> None:
    first, second = begun(client, 1, "one of two"), begun(client, 2)
    status, out, err = command("searches", "--limit", 2)
    assert status == 0
    listed = [(each["id"], each["name"]) for each in json.loads(out)["searches"]]
    assert listed == [(second.id, None), (first.id, "one of two")]
    assert "--limit lists more" in err
    for flags in (("--find", "OF TWO"), ("--find", first.id[:9])):
        (found,) = json.loads(command("searches", *flags)[1])["searches"]
        assert (found["id"], found["summary"]["time_unit"]) == (first.id, "us")
    client.cancel(first.id)
    client.wait(first.id, timeout=DEADLINE)
    states = {each["state"] for each in json.loads(command("searches", "--state", "running")[1])["searches"]}
    assert states == {"running"}
    for noun, flag, wrong in (("searches", "--state", "walking"), ("runs", "--limit", "50000")):
        status, _, err = command(noun, flag, wrong)
        assert (status, flag in err) == (2, True)

    run = waiting_run(client, "a run")
    assert command("runs")[1:] == command("runs", "--json")[1:]
    newest = json.loads(command("runs", "--find", "a run")[1])["runs"][0]
    assert newest == client.run(run.id).document


def test_a_terminal_gets_tables_unless_it_wants_json(
    command: Command, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    search, run = begun(client, 3, "[bold]llama"), waiting_run(client)
    heading, row = command("searches", "--find", search.id)[1].splitlines()
    assert heading.split() == ["ID", "NAME", "STATE", "SHAPE", "BEST", "GAP", "SUBMITTED"]
    for text in (search.id[:12], "[bold]llama", "running", "2 × 4", " 9 µs ", "125.00\u202f%", " s ago"):
        assert text in row
    heading, row = command("runs", "--find", run.id)[1].splitlines()
    for text in (run.id[:12], " - ", "waiting", "- of 7", "a.b:c", " s ago"):
        assert text in row
    assert json.loads(command("runs", "--find", run.id, "--json")[1])["runs"][0]["id"] == run.id


def test_a_search_is_followed_by_its_name_until_it_ends(
    command: Command, client: Client, folder: Path, tmp_path: Path
) -> None:
    search = begun(client, 4, "followed")
    (folder / "release").touch()
    try:
        status, out, err = command("follow", "followed", "-o", str(tmp_path / "plan.json"))
    finally:
        (folder / "release").unlink()
    ended = client.search(search.id)
    assert (status, out, ended.state) == (0, "", "done")
    assert f"plan {ended.plan_id}: objective 8 µs" in err
    assert json.loads((tmp_path / "plan.json").read_text()) == client.plan_document(str(ended.plan_id))
    assert command("follow", search.id[:12].upper())[0] == 0
    status, _, err = command("cancel", search.id)
    assert (status, "has ended already: it is done" in err) == (1, True)


def test_an_interrupt_stops_following_and_the_search_goes_on(
    command: Command, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = begun(client, 5)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Client, "wait", interrupt)
        status, _, err = command("follow", search.id)
    assert (status, f"zbv-service cancel {search.id} --server" in err) == (130, True)
    assert not client.search(search.id).is_finished


def test_a_search_and_a_run_are_cancelled_and_a_cancelled_run_is_followed_with_status_1(
    command: Command, client: Client
) -> None:
    search, run = begun(client, 6, "both"), waiting_run(client, "both")
    status, _, err = command("cancel", "both")
    assert (status, f"search {search.id} (running), run {run.id} (waiting)" in err) == (2, True)
    status, _, err = command("cancel", search.id)
    assert (status, f"search {search.id} is stopping" in err) == (0, True)
    assert client.wait(search.id, timeout=DEADLINE).state == "cancelled"
    status, _, err = command("cancel", run.id[:10])
    assert (status, f"run {run.id} is cancelled" in err) == (0, True)
    status, _, err = command("cancel", run.id)
    assert (status, "has ended already: it is cancelled" in err) == (1, True)
    status, out, err = command("follow", run.id)
    assert (status, out, "cancelled" in err) == (1, "", True)
    status, _, err = command("follow", run.id, "-o", "-")
    assert (status, "is a run; only searches have a plan" in err) == (2, True)
    planned = client.submit_run(
        None, MODEL, nodes=2, steps=7, problem=IN_US, search_options={"seed": 8}, name="planned first"
    )
    assert [search.name for search in client.searches(q="planned first")] == ["planned first"]
    status, _, err = command("cancel", "planned first")
    assert (status, f"run {planned.id} is" in err) == (0, True)


@pytest.mark.parametrize("given", ["", "zzz", "%", "f" * 33])
def test_an_unknown_id_is_wrong_input(command: Command, client: Client, given: str) -> None:
    client.submit(IN_US, {"seed": 7})
    for name in ("follow", "cancel"):
        status, out, err = command(name, given)
        assert (status, out, f"found no search or run {given!r}" in err) == (2, "", True)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_refused_token_and_a_missing_service_or_file_are_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"title": "T", "detail": "not you"})

    def away(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.chdir(tmp_path)
    if "a.json" in arguments:
        assert main(arguments) == 2
        assert "cannot read a.json" in capsys.readouterr().err
    Path("a.json").write_text(json.dumps(PROBLEM))
    for answer, message in ((refuse, "not you"), (away, "no answer from")):

        class Connected(Client):
            def __init__(self, address: str, answer: Any = answer) -> None:
                super().__init__(address, transport=httpx.MockTransport(answer), retries=0)

        monkeypatch.setattr(client_module, "Client", Connected)
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
