"""The server process: its socket, TLS, limits, and its message when it is ready."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import uvicorn
from fastapi import FastAPI

from zbv_service.app import create_app
from zbv_service.client.tokens import is_loopback
from zbv_service.security.local_token import kept_token, left_behind
from zbv_service.security.tokens import TokenText
from zbv_service.settings import Settings

BACKLOG = 2048
MOST_FILES = 65_536
SWITCH_SECONDS = 0.001


logger = logging.getLogger(__name__)


class CannotServe(Exception):
    """The server cannot start; the message says why and what to do."""


def serve(settings: Settings, prepare: Callable[[], None]) -> bool:
    """Serve until a signal; False when the start failed, which the log explains.

    Parameters
    ----------
    prepare
        Called once nothing else can refuse the start: it may create the database.

    Raises
    ------
    CannotServe
        When the address is in use, not the one that its name promises, or reachable without protection, or
        certificates are unusable.
    """
    _allow_files()
    with ExitStack() as stack:
        # Bind first: the service that holds the port owns its token.
        listener = stack.enter_context(_listen(settings.host, settings.port))
        _require_loopback_if_local(listener, settings)
        _require_protection(listener.getsockname()[0], settings)
        local = _local_token(settings)
        app = create_app(settings, local_token=local)
        config = config_of(app, settings)
        if local is not None:
            path = stack.enter_context(left_behind(listener.getsockname()[1], str(local)))
            if path is None:
                print("zbv-service: cannot write the token for commands on this machine; set XDG_STATE_HOME.")
        prepare()
        server = _Server(config, app, _address(listener, settings))
        server.run(sockets=[listener])
    return server.started


def _require_loopback_if_local(listener: socket.socket, settings: Settings) -> None:
    """Raise :class:`CannotServe` when a local name, such as localhost, is not a loopback address."""
    address = listener.getsockname()[0]
    if settings.is_local and not is_loopback(address):
        raise CannotServe(
            f"--host: found {settings.host}, which resolves to {address}, so other machines can reach it. "
            f"Use 127.0.0.1, or correct the name's entry (in /etc/hosts, for example)."
        )


def _require_protection(address: str, settings: Settings) -> None:
    """Raise :class:`CannotServe` when others reach the service without TLS and without a trusted proxy.

    An operator who names proxies is assumed to have one that uses TLS and limits connections and heads of
    requests, which the server does not.
    """
    has_proxy = settings.trusted_proxies != Settings.model_fields["trusted_proxies"].default
    if (
        is_loopback(address)
        or settings.tls_cert is not None
        or has_proxy
        or settings.plain_http == "anywhere"
    ):
        return
    raise CannotServe(
        f"--host: found {settings.host} ({address}) without TLS: anyone who sees the traffic could read "
        f"the tokens in it. Use TLS (--tls-cert and --tls-key) or a proxy with TLS, on this machine with "
        f"--host 127.0.0.1 or elsewhere with --trusted-proxies ADDRESS. In a private network, "
        f"--plain-http anywhere permits it."
    )


def _local_token(settings: Settings) -> TokenText | None:
    """The token for commands on this machine; None if the service has none.

    With port 0 every start gets a new token, because the port differs, too.
    """
    if not settings.is_local or settings.auth != "tokens":
        return None
    return TokenText.new() if settings.port == 0 else kept_token(settings.port, settings.database)


class _Server(uvicorn.Server):
    """Prints where it listens, and ends long requests before a shutdown waits for the others."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, address: str):
        super().__init__(config)
        self._app = app
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            _limit_handshakes(self._app.state.settings.request_seconds)
        await super().startup(sockets)
        if not self.started:
            return
        # Loaded modules stay in memory. Without this the garbage collector scans them for a quarter of a
        # second, while all requests wait.
        gc.collect()
        gc.freeze()
        # Threads that write long lists must yield to the others this often.
        sys.setswitchinterval(SWITCH_SECONDS)
        print(f"zbv-service: listening on {self._address}", flush=True)
        application = self._app.state.application
        if (grant := application.access.local_grant) is None:
            return
        command = f"zbv-service token link --server {self._address}"
        if not sys.stdout.isatty():  # others may read a log, and the link permits everything
            print(f"zbv-service: for a link that signs a browser in: {command}", flush=True)
            return
        token = await application.sign_in.new_link(grant)
        print(
            f"zbv-service: to sign in, open {self._address}/sign-in?token={token}\n"
            f"zbv-service: (works once; for another link: {command})",
            flush=True,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Agents wait seconds for work, and readers wait hours for events; the server would wait for them.
        self._app.state.application.dispatcher.hang_up()
        self._app.state.application.events.hang_up()
        self._app.state.application.run_events.hang_up()
        await super().shutdown(sockets)


def _limit_handshakes(seconds: float) -> None:
    """Limit every TLS handshake of this event loop; uvicorn has no setting, and asyncio waits a minute."""
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def create_server(*arguments: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = seconds
        return await create(*arguments, **options)

    loop.create_server = create_server  # type: ignore[method-assign]


def config_of(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """The server's configuration for an application; raises :class:`CannotServe`."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=settings.keep_alive_seconds,
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        log_config=None,
        access_log=False,  # the service logs more, and omits the query, which may contain a token
        timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
        lifespan="on",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_ca is None else str(settings.tls_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        paths = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        names = ", ".join(str(path) for path in paths if path)
        raise CannotServe(
            f"cannot use {names} for TLS: {error.strerror or error}. They must be PEM files, and the key "
            f"must belong to the certificate and have no passphrase."
        ) from None
    return config


def _allow_files() -> None:
    """Raise the limit of open files as far as the system permits, because each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            stack.pop_all()  # keep it open
    except OSError as error:
        raise CannotServe(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another --host or --port (0 "
            f"chooses a free one)."
        ) from None
    return listener


def _address(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    # A certificate contains the name, not the address to which it resolves.
    name = settings.host if settings.tls_cert is not None and not settings.host.startswith("0.") else host
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
