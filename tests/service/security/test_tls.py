"""TLS: server and client certificates, and connections that time out."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from zbv_service.client import Client, tls
from zbv_service.client.tokens import CredentialsUnusable
from zbv_service.client.tokens import find as find_token
from zbv_service.commands.cli import main
from zbv_worker.commands.cli import main as worker

COMMAND = [sys.executable, "-c", "import sys; from zbv_service.commands.cli import main; sys.exit(main())"]


class Certificates:
    """Files of a server and a client certificate of one authority, and a client certificate of another."""

    def __init__(self, folder: Path):
        self.folder, self.ca = folder, folder / "ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca))
        self.server = self._issue(authority, "server", "127.0.0.1", "localhost")
        self.client = self._issue(authority, "client", "agent@zbv.example")
        self.stranger = self._issue(trustme.CA(), "stranger", "stranger@zbv.example")

    def _issue(self, by: trustme.CA, name: str, *identities: str) -> tuple[Path, Path]:
        made = by.issue_cert(*identities)
        chain, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        chain.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return chain, key

    def context(self, shown: tuple[Path, Path] | None) -> ssl.SSLContext:
        """The TLS context of a client that trusts this authority and presents a certificate."""
        made = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            made.load_cert_chain(*shown)
        return made


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def address(certificates: Certificates) -> Iterator[str]:
    """A service that requires client certificates and has short timeouts."""
    (chain, key), folder = certificates.server, certificates.folder
    flags = ["--tls-cert", str(chain), "--tls-key", str(key), "--tls-ca", str(certificates.ca)]
    flags += ["--database", f"sqlite:///{folder}/zbv.db", "--request-seconds", "5", "--searches", "1"]
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"listening on (https://\S+)", process.stdout.readline())
            assert found, "the service did not start (see its standard error)"
            yield found[1]
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_a_client_with_certificate_and_token_is_served(certificates: Certificates, address: str) -> None:
    context = certificates.context(certificates.client)
    with httpx.Client(base_url=address, verify=context, timeout=60) as http:
        assert http.get("/v1/searches").status_code == 401
        answer = http.get("/healthz")
    assert answer.status_code == 200
    assert "max-age=" in answer.headers["strict-transport-security"]
    with Client(address, verify=context) as client:
        assert client.searches() == [], "the client found the local token"


@pytest.mark.parametrize("shown", ["nothing", "a stranger's"])
def test_a_client_without_valid_certificate_is_refused(
    certificates: Certificates, address: str, shown: str
) -> None:
    context = certificates.context(None if shown == "nothing" else certificates.stranger)
    with httpx.Client(base_url=address, verify=context) as http, pytest.raises(httpx.TransportError):
        http.get("/healthz")


def test_commands_take_certificates_by_flags(
    certificates: Certificates,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (tls.CA_VARIABLE, tls.CERT_VARIABLE, tls.KEY_VARIABLE):
        monkeypatch.setenv(name, "")  # the command sets them; monkeypatch restores them
    chain, key = certificates.client
    flags = ["--tls-ca", str(certificates.ca), "--tls-cert", str(chain), "--tls-key", str(key)]
    command = ["searches", "--server", address]
    assert main(command) == 1
    refused = capsys.readouterr().err
    assert ("CERTIFICATE_VERIFY_FAILED" in refused, "--tls-ca" in refused) == (True, True)
    assert main([*command, *flags]) == 0
    agent = ["agent", "--server", "https://127.0.0.1:9", "--tls-ca", str(certificates.folder / "none.pem")]
    assert worker(agent) == 2
    assert "cannot read" in capsys.readouterr().err


def test_an_unusable_tls_file_is_an_error_that_names_it(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tls.find() is True
    monkeypatch.setenv(tls.KEY_VARIABLE, str(certificates.client[1]))
    with pytest.raises(CredentialsUnusable, match=r"found --tls-key .* without --tls-cert"):
        tls.find()
    monkeypatch.setenv(tls.CERT_VARIABLE, str(certificates.server[0]))
    with pytest.raises(CredentialsUnusable, match="must be PEM files, and the key must belong"):
        tls.find()
    monkeypatch.setenv(tls.CERT_VARIABLE, str(certificates.client[0]))
    assert isinstance(tls.find(), ssl.SSLContext)


def test_a_client_that_never_begins_tls_is_disconnected(address: str) -> None:
    """Before asyncio's own limit, a minute."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=50) as silent:
        assert silent.recv(100) == b""


def test_a_missing_body_is_answered_with_408(certificates: Certificates, address: str) -> None:
    port = int(address.rpartition(":")[2])
    head = (
        f"POST /v1/searches HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {find_token(address)}\r\n"
        f"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    )
    context = certificates.context(certificates.client)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(10_000):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"/errors/body-too-slow" in answer


def test_a_slow_response_keeps_its_connection(certificates: Certificates, address: str) -> None:
    with httpx.Client(base_url=address, verify=certificates.context(certificates.client), timeout=60) as http:
        fields = {"Authorization": f"Bearer {find_token(address)}"}
        body = {"id": "a" * 32, "name": "a", "address": "10.0.0.1", "port": 29500, "slots": 1}
        assert http.post("/v1/agents", json={**body, "allows": {}}, headers=fields).status_code == 201
        began = time.monotonic()
        answer = http.get(f"/v1/agents/{'a' * 32}/work", params={"wait": 1}, headers=fields)
        assert answer.status_code == 204
        assert time.monotonic() - began > 0.75, "longer than a request head may take"
