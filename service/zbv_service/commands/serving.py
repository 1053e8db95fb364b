"""The server process: its socket, TLS, limits, and what it prints when it is ready."""

from __future__ import annotations

import gc
import logging
import resource
import socket
import ssl
import sys
from contextlib import ExitStack

import uvicorn
from fastapi import FastAPI

from zbv_service.api.connections import ConnectionLimits, limited
from zbv_service.app import create_app
from zbv_service.client.tokens import is_loopback
from zbv_service.security.local_token import kept_token, left_behind
from zbv_service.security.token_text import TokenText
from zbv_service.settings import Settings

MAX_HEAD_BYTES = 64 * 1024
BACKLOG = 2048
MOST_FILES = 65_536
SWITCH_SECONDS = 0.001


logger = logging.getLogger(__name__)


class CannotServe(Exception):
    """The server cannot start; the message says why and what to do."""


def serve(settings: Settings) -> bool:
    """Serve until a signal; False when the start failed, which the log explains.

    Raises
    ------
    CannotServe
        When the address is taken or is not what its name promises, or certificates cannot be used.
    """
    _allow_files()
    with ExitStack() as stack:
        # Bind first: the service that holds the port owns its token.
        listener = stack.enter_context(_listen(settings.host, settings.port))
        _require_loopback_if_local(listener, settings)
        if (warning := exposure(listener.getsockname()[0], settings)) is not None:
            logger.warning(warning)
        local = _local_token(settings)
        app = create_app(settings, local_token=local)
        config = config_of(app, settings)
        if local is not None:
            path = stack.enter_context(left_behind(listener.getsockname()[1], str(local)))
            if path is None:
                print("zbv-service: cannot leave a token for commands on this machine; set XDG_STATE_HOME.")
        server = _Server(config, app, _address(listener, settings))
        server.run(sockets=[listener])
    return server.started


def _require_loopback_if_local(listener: socket.socket, settings: Settings) -> None:
    """A name for this machine, such as localhost, can stand for another address; raises CannotServe."""
    address = listener.getsockname()[0]
    if settings.is_local and not is_loopback(address):
        raise CannotServe(
            f"found host {settings.host}, which is {address} here: others can reach it. Use 127.0.0.1, or "
            f"correct the name's entry (in /etc/hosts, for example)."
        )


def exposure(address: str, settings: Settings) -> str | None:
    """What to warn of when a service listens on an address; None when there is nothing.

    Who names proxies other than the default is taken to have one that speaks TLS.
    """
    has_proxy = settings.trusted_proxies != Settings.model_fields["trusted_proxies"].default
    if is_loopback(address) or settings.tls_cert is not None or has_proxy:
        return None
    return (
        f"listening on {settings.host} ({address}) without TLS: whoever can see the traffic can take the "
        f"tokens in it. Serve TLS (--tls-cert and --tls-key), or put a proxy that does before the service: "
        f"on this machine with --host 127.0.0.1, or elsewhere with --trusted-proxies ADDRESS."
    )


def _local_token(settings: Settings) -> TokenText | None:
    """The token for commands on this machine; None where there is none.

    A service that takes any free port gets a new one: its clients do not find it again either.
    """
    if not settings.is_local or settings.auth != "tokens":
        return None
    return TokenText.new() if settings.port == 0 else kept_token(settings.port, settings.database)


class _Server(uvicorn.Server):
    """Says when and where it listens, and lets agents go before it waits for requests to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, address: str):
        super().__init__(config)
        self._app = app
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        # What was loaded stays. Without this the collector goes through all of it, a quarter of a second,
        # while everybody waits.
        gc.collect()
        gc.freeze()
        # A thread that writes a list lets the others on this often.
        sys.setswitchinterval(SWITCH_SECONDS)
        print(f"zbv-service: listening on {self._address}", flush=True)
        application = self._app.state.application
        if (grant := application.access.tokens.local_grant) is not None:
            token = await application.sign_in.new_link(grant)
            print(
                f"zbv-service: to sign in, open {self._address}/sign-in?token={token}\n"
                f"zbv-service: (works once; for another link: zbv-service token link)",
                flush=True,
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Agents wait for work for seconds, and readers of events for hours; the server would wait as long.
        self._app.state.application.dispatcher.hang_up()
        self._app.state.application.events.hang_up()
        await super().shutdown(sockets)


def config_of(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How the server serves an application; raises :class:`CannotServe`."""
    config = uvicorn.Config(
        app,
        http=limited(ConnectionLimits(settings.request_seconds, MAX_HEAD_BYTES, settings.max_connections)),
        ws="none",
        timeout_keep_alive=settings.keep_alive_seconds,
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        log_config=None,
        access_log=False,  # our own lines say more, and no query, which may hold a token
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
            f"that of the certificate, without a passphrase."
        ) from None
    return config


def _allow_files() -> None:
    """Take as many files, and so connections, as the system lets this process have."""
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
            stack.pop_all()  # open from here on
    except OSError as error:
        raise CannotServe(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose others (--port 0)."
        ) from None
    return listener


def _address(listener: socket.socket, settings: Settings) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    # A certificate holds the name that was asked for, not the number that it stands for.
    name = settings.host if settings.tls_cert is not None and not settings.host.startswith("0.") else host
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
