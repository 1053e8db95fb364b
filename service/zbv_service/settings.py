"""The settings of the service: flags take precedence over ``ZBV_…`` variables, and these over defaults."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from zbv_solver.search.options import Effort

from zbv_service.client.tokens import is_loopback

MEBIBYTE = 1024 * 1024
LEAST_SEARCH_MEMORY, MOST_SEARCH_MEMORY = 512, 768
"""MiB. The largest problems that the service takes need 500."""
OTHER_MEMORY = 768
"""MiB for the service's own process and computations of requests, in addition to the largest searches."""
MOST_PROCESSES = 1024
DAY = 86_400.0
MOST_DAYS = 36_500
"""The longest retention: a century counts as forever."""
YEAR = 366 * DAY
"""The longest time that settings accept. Longer ones are mistakes and could overflow dates."""


_Days = Annotated[float, Field(gt=0, le=MOST_DAYS)]
_Seconds = Annotated[float, Field(gt=0, le=DAY)]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory that this process may use: the machine's, or that of its control group."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(Path(path).read_text()))
    return found


def _search_memory() -> int:
    """MiB of a search: half of the memory for the most searches by default, within bounds."""
    share = memory_bytes() // MEBIBYTE // 2 // (cores() + 1)
    return max(LEAST_SEARCH_MEMORY, min(MOST_SEARCH_MEMORY, share))


@dataclass(frozen=True)
class ExecutorChoice:
    """An operator's choice of an executor."""

    scheduler: str | None = None
    """Address of a Dask scheduler in Dask's form; None for processes on this machine."""
    processes: int | None = None
    """Number of processes; None for as many as searches may run."""


def parse_choice(text: str) -> ExecutorChoice:
    """Read ``processes``, ``processes:N``, ``dask://host:port`` or ``tls://host:port``; raises ValueError."""
    if text == "processes":
        return ExecutorChoice()
    if found := re.fullmatch(r"processes:([0-9]{1,9})", text):
        count = int(found[1])
        if not 1 <= count <= MOST_PROCESSES:
            raise ValueError(f"found {text!r}; processes must be from 1 to {MOST_PROCESSES}.")
        return ExecutorChoice(processes=count)
    if found := re.fullmatch(r"(dask|tls)://(\[[0-9A-Fa-f:.%]+\]|[^\s/:@\[\]]+):([0-9]{1,5})/?", text):
        scheme, host, port = found.groups()
        if 1 <= int(port) <= 65535:
            return ExecutorChoice(scheduler=f"{'tls' if scheme == 'tls' else 'tcp'}://{host}:{port}")
    raise ValueError(
        f"found {text!r}; must be processes, processes:N with the number of searches at the same time, "
        f"dask://HOST:PORT with the address of a Dask scheduler, or tls://HOST:PORT for one that speaks TLS."
    )


class Settings(BaseSettings):
    """Settings of one service process. Each field is also the environment variable ``ZBV_<FIELD>``."""

    model_config = SettingsConfigDict(env_prefix="ZBV_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    auth: Literal["tokens", "none"] = Field(
        "tokens",
        description="Who may use the service: users with a token, or every user of this machine (only on "
        "127.0.0.1).",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Host names that requests may use, separated by commas; * allows any. By default this "
        "machine's names on the loopback interface, and any name elsewhere.",
    )
    trusted_proxies: str = Field(
        "127.0.0.1",
        description="Addresses of proxies, separated by commas. The service uses their X-Forwarded-… fields.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM). Enables TLS.")
    tls_key: Path | None = Field(None, description="Private key of the certificate (PEM).")
    tls_ca: Path | None = Field(
        None,
        description="Certificate authorities (PEM). Every client must present a certificate signed by one "
        "of them.",
    )
    plain_http: Literal["loopback", "anywhere"] = Field(
        "loopback",
        description="Where the service may listen without TLS and without trusted proxies: on this machine "
        "alone, or anywhere.",
    )
    session_hours: float = Field(168.0, gt=0, le=400 * 24, description="How long a browser stays signed in.")
    database: str = Field("sqlite:///zbv.db", description="URL of the database that holds all state.")
    searches: int = Field(
        default_factory=cores,
        json_schema_extra={"shown_default": "one per core"},
        ge=1,
        le=1024,
        description="Searches that this service runs at the same time. On a Dask cluster the default is the "
        "number of its workers' threads. While one token runs all of them, a search of another token gets "
        "one more.",
    )
    search_memory: int = Field(
        default_factory=_search_memory,
        json_schema_extra={"shown_default": "half of the memory, divided by the searches; 512 to 768"},
        ge=64,
        le=MEBIBYTE,
        description="MiB of memory that a search may take in a process of this machine. A search that needs "
        "more fails. Workers of Dask have a limit of their cluster.",
    )
    search_workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads per search; more than 2 are not used. By default 2 while cores are idle, "
        "otherwise 1; on a Dask cluster 1. The plan does not depend on it.",
    )
    executor: str = Field(
        "processes",
        description="Where searches run: processes, processes:N, dask://HOST:PORT or tls://HOST:PORT.",
    )
    preload: Literal["at-start", "at-first-search"] = Field(
        "at-start",
        description="When to load the planner and the code that draws: at the start, or for the first search "
        "or page, which then takes a second or two longer.",
    )
    max_body_bytes: int = Field(8 * MEBIBYTE, ge=1, description="Largest request body, except for plans.")
    max_plan_bytes: int = Field(64 * MEBIBYTE, ge=1, description="Largest request body of a plan.")
    max_trace_bytes: int = Field(
        32 * MEBIBYTE, ge=1, description="Largest trace of a rank after decompression."
    )
    max_cells: int = Field(
        2 * 262_144, ge=1, description="Largest pp_degree times microbatches of a search or an import."
    )
    max_time_limit: float = Field(
        DAY,
        gt=0,
        le=YEAR,
        description="Largest time_limit of a search, in seconds. A search without a time_limit also stops "
        "after this time and keeps its best plan.",
    )
    max_effort: Effort = Field("thorough", description="Highest effort of a search.")
    max_searches_per_token: int = Field(
        2000, ge=1, description="Unfinished searches per token, unless the token has its own limit."
    )
    max_running_per_token: int = Field(
        default_factory=lambda: max(1, cores() // 2),
        json_schema_extra={"shown_default": "half of the cores"},
        ge=1,
        description="A token with this many running searches, in all services of the database, waits while "
        "other tokens have searches queued.",
    )
    max_stored_bytes_per_token: int = Field(
        16 * 1024 * MEBIBYTE,
        ge=1,
        description="Bytes that a token may store: its searches with their plans, its imported plans, its "
        "runs and its agents.",
    )
    max_stored_rows_per_token: int = Field(
        100_000,
        ge=1,
        description="Searches that a token may store, ended ones included; as many imported plans, runs, and "
        "sessions with sign-in links.",
    )
    max_agents_per_token: int = Field(
        2048, ge=1, description="Agents of a token that are registered at the same time."
    )
    max_connections: int = Field(
        4096, ge=1, description="Connections at the same time; beyond, the service answers 503."
    )
    keep_alive_seconds: int = Field(
        5, ge=1, le=86_400, description="Seconds for which an idle connection stays open."
    )
    request_seconds: _Seconds = Field(
        20.0, description="Longest TLS handshake, and longest pause in the body of a request."
    )
    computation_seconds: _Seconds = Field(
        120.0,
        description="Longest computation for a request or a page, such as an estimate, a simulation or an "
        "import; searches have their own limits.",
    )
    lease_seconds: _Seconds = Field(
        10.0, description="How long a running search belongs to a service that does not renew its lease."
    )
    heartbeat_seconds: _Seconds = Field(2.0, description="How often a service renews its leases.")
    max_crashes: int = Field(
        3,
        ge=1,
        description="A search fails when its process has died this often; before, it is started again.",
    )
    stop_seconds: float = Field(
        60.0,
        gt=0,
        description="When a search has not stopped this long after it was cancelled or reached its time "
        "limit, its process is killed; its best plan is kept.",
    )
    keep_days: _Days = Field(
        90.0,
        description="Days to keep searches that did not fail, with their events; traces and logs of runs; "
        "and agents, tokens and sessions after their end.",
    )
    keep_plan_days: _Days = Field(
        365.0,
        description="Days to keep plans after they were last fetched or found, unless a search, a run or a "
        "trace refers to them; runs; and failed searches with their problems.",
    )
    shutdown_seconds: _Seconds = Field(
        5.0, description="Time for running searches and requests to stop after SIGTERM."
    )
    agent_heartbeat_seconds: _Seconds = Field(2.0, description="Seconds between two heartbeats of an agent.")
    agent_timeout_seconds: _Seconds = Field(
        15.0, description="An agent without a heartbeat for this long is lost, and its run fails."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity of log lines."
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="Format of log lines; auto means text on a terminal and json elsewhere."
    )

    @property
    def is_local(self) -> bool:
        """Whether the service listens on the loopback interface, which only this machine can reach."""
        return is_loopback(self.host)

    @property
    def host_names(self) -> list[str]:
        """The names by which requests may call the service.

        A page of another site can let its own name point to this machine, and a browser would then treat the
        service as part of that site ("DNS rebinding"). So a local service knows its own names alone.
        """
        if "*" in self.allowed_hosts or not (self.allowed_hosts or self.is_local):
            return ["*"]
        bound = f"[{self.host}]" if ":" in self.host else self.host
        return [*self.allowed_hosts, bound, "localhost", "127.0.0.1", "[::1]"]

    @property
    def memory(self) -> int:
        """Bytes for the service with all its processes, beyond which computations of requests are ended."""
        return (self.searches * LEAST_SEARCH_MEMORY + OTHER_MEMORY) * MEBIBYTE

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _hosts_are_separated_by_commas(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if "*" in name.removeprefix("*.") and name != "*":
                raise ValueError(f"found {name!r}; * stands alone or before a domain, such as *.example.com.")
        return value

    @field_validator("executor")
    @classmethod
    def _executor_is_usable(cls, value: str) -> str:
        if parse_choice(value).scheduler is not None and importlib.util.find_spec("distributed") is None:
            raise ValueError(f"found {value!r}; Dask is not installed. Install it: pip install 'zbv[dask]'.")
        return value

    @field_validator("database")
    @classmethod
    def _database_is_usable(cls, value: str) -> str:
        async_url(value)
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("found only one of --tls-cert and --tls-key; TLS needs both.")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError(
                "found --tls-ca without --tls-cert and --tls-key; clients present certificates only with TLS."
            )
        return self

    @model_validator(mode="after")
    def _only_the_machine_itself_needs_no_token(self) -> Settings:
        if self.auth == "none" and not self.is_local:
            raise ValueError(
                f"found --auth none and --host {self.host}; without tokens anyone who can reach the service "
                f"could run code on its agents, so the host must be 127.0.0.1. Create a token instead: "
                f"zbv-service token create."
            )
        return self

    @model_validator(mode="after")
    def _several_heartbeats_fit(self) -> Settings:
        lengths = (
            ("heartbeat_seconds", "lease_seconds", 2, "other services take over healthy searches"),
            ("agent_heartbeat_seconds", "agent_timeout_seconds", 3, "healthy agents are lost"),
        )
        for beat, limit, count, otherwise in lengths:
            found, longest = getattr(self, beat), getattr(self, limit)
            if found > longest / count:
                raise ValueError(
                    f"found {beat} {found:g} and {limit} {longest:g}; {limit} must be at least {count} times "
                    f"{beat}, or {otherwise}."
                )
        return self


_DRIVERS = {
    "sqlite": ("sqlite+aiosqlite", "aiosqlite", "service"),
    "postgresql": ("postgresql+psycopg", "psycopg", "postgres"),
}
"""For each kind of database: the driver, its module, and the extra of zbv that installs it."""


def async_url(text: str) -> URL:
    """A database URL with its asynchronous driver filled in.

    Raises
    ------
    ValueError
        The text is not a database URL, names an unsupported database, or the driver is not installed.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        raise ValueError(
            f"found {text!r}; must be a database URL such as sqlite:///zbv.db or "
            f"postgresql://user@host/name. A path alone needs sqlite:/// before it."
        ) from None
    backend = url.get_backend_name()
    if backend not in _DRIVERS:
        raise ValueError(f"found {backend!r}; must be a URL of {' or '.join(_DRIVERS)}.")
    drivername, module, extra = _DRIVERS[backend]
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"found {backend!r}; its driver is not installed. Run: pip install 'zbv[{extra}]'.")
    if backend == "sqlite" and sqlite_file(text) is None:
        raise ValueError(
            f"found {text!r}; must name a file, because a database in memory ends with its process."
        )
    return url.set(drivername=drivername)


def shown_url(text: str) -> str:
    """A database URL without its password, for display."""
    return make_url(text).render_as_string(hide_password=True)


def sqlite_file(text: str) -> Path | None:
    """The file of a SQLite database; None for other databases."""
    url = make_url(text)
    name = url.database or ":memory:"
    return Path(name) if url.get_backend_name() == "sqlite" and name != ":memory:" else None
