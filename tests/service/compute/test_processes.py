"""The service in real processes, with real signals."""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.processes import is_alive, wait_until
from support.served import Served, begun, start_services
from support.serving import DEADLINE, PROBLEM
from zbv_service.client import tokens
from zbv_service.commands.cli import main
from zbv_solver.verify.verifier import verify
from zbv_worker.host.local_ranks import free_port


def none_lives(process_ids: list[int]) -> bool:
    return not any(map(is_alive, process_ids))


def test_no_signal_loses_a_search_or_leaves_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three services, one after the other, with one directory, port, search and client."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with ExitStack() as stack:
        port = str(free_port())

        def serve() -> Served:
            (served,) = start_services(stack, tmp_path, 1, "--port", port, "--searches", "2")
            return served

        served = serve()
        before = begun(served.client)
        token = tokens.find(served.address)
        fields = {"Authorization": f"Bearer {token}"}
        polling = httpx.Client(base_url=served.address, headers=fields, timeout=60)
        other = served.client.submit(PROBLEM, {"effort": "standard", "seed": 2})
        for attempt, number in enumerate((signal.SIGKILL, signal.SIGTERM), start=2):
            below = served.children
            assert below, "the process of the search"
            served.process.send_signal(number)
            status = served.process.wait(timeout=DEADLINE)
            assert status == (-number if number == signal.SIGKILL else 0)
            wait_until(partial(none_lives, below), f"the end of {below}")

            served = serve()
            polled = polling.get(f"/v1/searches/{before.id}")
            assert (polled.status_code, polled.json()["id"]) == (200, before.id), polled.text
            resumed = begun(served.client, search_id=before.id, attempt=attempt)
            assert (resumed.objective or 0) <= (before.objective or 0) * (1 + 1e-9)
            before = resumed

        client = served.client
        assert client.wait(other.id, timeout=DEADLINE).state == "done"
        client.cancel(before.id)
        after = client.wait(before.id, timeout=DEADLINE)
        assert (after.state, after.attempts) == ("cancelled", 3)
        assert (after.objective or 0) <= (before.objective or 0) * (1 + 1e-9)
        verify(client.plan(str(after.plan_id)))
        assert polling.get(f"/v1/searches/{before.id}").json()["state"] == "cancelled"
        polling.close()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a ``zbv-service`` command that prints nothing else."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root, level = logging.getLogger(), logging.getLogger().level
    hidden = list(root.handlers)
    try:
        status = main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        root.handlers[:] = hidden
        root.setLevel(level)
    said = capsys.readouterr()
    assert said.out == ""
    return status, said.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--database", "sqlite:///no/such/directory/zbv.db"], "directory must exist"),
        (["--database", f"sqlite:///{__file__}"], "cannot use the database"),
        (["--port", "PORT"], "cannot listen on 127.0.0.1 port PORT"),
        (["--tls-cert", "no.pem", "--tls-key", "no.key"], "cannot use no.pem, no.key for TLS"),
        (["--host", "0.0.0.0"], "without TLS: anyone who sees the traffic"),
        (["--host", "0.0.0.0", "--plain-http", "anywhere"], "zbv-service token create --name admin --scope"),
    ],
)
def test_a_service_that_cannot_start_says_why_without_a_traceback(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        status, said = refusal(capsys, "serve", *(flag.replace("PORT", port) for flag in flags))
    assert status == 2
    assert message.replace("PORT", port) in said
    assert "Traceback" not in said
    # A token is created in the database, so that one must exist.
    assert bool([*tmp_path.glob("*.db")]) == ("token create" in message)
