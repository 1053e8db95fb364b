"""What an operator can set: command line flags first, then ``ZBV_…`` environment variables, then defaults."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from zbv_solver.search.options import Effort

from zbv_service.client.tokens import is_loopback
from zbv_service.compute.executor_choice import parse_choice
from zbv_service.database.url import async_url

MEBIBYTE = 1024 * 1024
DAY = 86_400.0
MOST_DAYS = 36_500
"""Keeping something for a century is keeping it for ever."""
YEAR = 366 * DAY
"""Longer times than these are mistakes, and moments after them may be none."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """Settings of one service process. Each field is also the environment variable ``ZBV_<FIELD>``."""

    model_config = SettingsConfigDict(env_prefix="ZBV_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    auth: Literal["tokens", "none"] = Field(
        "tokens",
        description="Who may use the service: whoever has a token, or, on this machine alone, everybody.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Names under which the service is reached, separated by commas; * is any. By default "
        "this machine's own on the loopback interface, and any elsewhere.",
    )
    trusted_proxies: str = Field(
        "127.0.0.1",
        description="Addresses of proxies, separated by commas, whose X-Forwarded-… fields are believed.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM): the service speaks TLS.")
    tls_key: Path | None = Field(None, description="Its private key (PEM).")
    tls_ca: Path | None = Field(
        None, description="Certificate authorities (PEM): every client must show a certificate of theirs."
    )
    session_hours: float = Field(168.0, gt=0, le=400 * 24, description="How long a browser stays signed in.")
    database: str = Field("sqlite:///zbv.db", description="URL of the database that holds all state.")
    searches: int = Field(
        default_factory=cores,
        json_schema_extra={"shown_default": "one per core"},
        ge=1,
        le=1024,
        description="Searches of this service that run at the same time; on a Dask cluster, unless it is "
        "set, as many as its workers have threads.",
    )
    search_workers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads of each search; more than 2 are not used. By default 2 while cores are idle, "
        "otherwise 1; on a Dask cluster 1. The plan does not depend on it.",
    )
    executor: str = Field(
        "processes",
        description="Where searches are computed: processes, processes:N, dask://HOST:PORT or tls://HOST:PORT.",
    )
    preload: Literal["at-start", "at-first-search"] = Field(
        "at-start",
        description="When the planner is loaded for search processes of this machine, and what draws for the "
        "pages: at the start, or by the first search or page, which then takes a second or two longer.",
    )
    max_body_bytes: int = Field(8 * MEBIBYTE, ge=1, description="Largest request body, plans aside.")
    max_plan_bytes: int = Field(64 * MEBIBYTE, ge=1, description="Largest body of a plan to import.")
    max_trace_bytes: int = Field(
        32 * MEBIBYTE, ge=1, description="Largest trace of a rank, once it is decompressed."
    )
    max_cells: int = Field(
        2 * 262_144,
        ge=1,
        description="Largest pp_degree times microbatches accepted, for searches and imports.",
    )
    max_time_limit: float = Field(
        DAY,
        gt=0,
        le=YEAR,
        description="Largest time_limit of a search, in seconds. A search without a time_limit is stopped "
        "after this time, too, and keeps the best plan that it found.",
    )
    max_effort: Effort = Field("thorough", description="Highest effort of a search accepted.")
    max_searches_per_token: int = Field(
        2000, ge=1, description="Unfinished searches that a token may have, unless it says otherwise itself."
    )
    max_running_per_token: int = Field(
        default_factory=lambda: max(1, cores() // 2),
        json_schema_extra={"shown_default": "half of the cores"},
        ge=1,
        description="A token with so many running searches, in all services of the database, waits while "
        "other tokens have searches queued.",
    )
    max_connections: int = Field(
        4096, ge=1, description="Connections at the same time; more are answered 503."
    )
    keep_alive_seconds: int = Field(5, ge=1, le=86_400, description="How long an idle connection is kept.")
    request_seconds: float = Field(
        20.0,
        gt=0,
        le=DAY,
        description="How long the head of a request may take to arrive, and a pause in its body.",
    )
    lease_seconds: float = Field(
        10.0,
        gt=0,
        le=DAY,
        description="How long a running search belongs to a service that gives no sign of life.",
    )
    heartbeat_seconds: float = Field(2.0, gt=0, le=DAY, description="How often a service renews its leases.")
    max_crashes: int = Field(
        3, ge=1, description="A search whose process dies this often is failed instead of started again."
    )
    stop_seconds: float = Field(
        300.0,
        gt=0,
        description="A search that does not stop for so long after it should, be it cancelled or past its "
        "time limit, is ended with its process.",
    )
    idempotency_seconds: float = Field(
        DAY,
        gt=0,
        le=YEAR,
        description="How long the Idempotency-Key of a request is remembered.",
    )
    keep_days: float = Field(
        90.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which searches are kept after their end, with their events, and traces and "
        "logs of runs after the run.",
    )
    keep_failed_days: float = Field(
        365.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which failed searches are kept, with their problems.",
    )
    keep_plan_days: float = Field(
        365.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which a plan is kept after it was last fetched or found, unless a search, a "
        "run or a trace refers to it.",
    )
    keep_run_days: float = Field(
        365.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which runs are kept after their end, with their generations and events.",
    )
    keep_agent_days: float = Field(
        30.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which agents that have left or are lost are kept, unless a run had them.",
    )
    keep_token_days: float = Field(
        90.0,
        gt=0,
        le=MOST_DAYS,
        description="Days for which tokens, sessions and links are kept after they expired or were revoked.",
    )
    shutdown_seconds: float = Field(
        5.0, gt=0, le=DAY, description="How long running searches and requests get to stop on SIGTERM."
    )
    agent_heartbeat_seconds: float = Field(
        2.0, gt=0, le=DAY, description="How often agents should give a sign of life."
    )
    agent_timeout_seconds: float = Field(
        15.0, gt=0, le=DAY, description="An agent that is silent for this long is lost, and its run fails."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines shown."
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="How log lines look; auto is text on a terminal and json elsewhere."
    )

    @property
    def is_local(self) -> bool:
        """Whether it listens on the loopback interface, where only this machine reaches it."""
        return is_loopback(self.host)

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _hosts_are_separated_by_commas(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

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
            raise ValueError("found one of tls_cert and tls_key; TLS needs both.")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("found tls_ca without tls_cert and tls_key; only with TLS do clients show one.")
        return self

    @model_validator(mode="after")
    def _only_the_machine_itself_needs_no_token(self) -> Settings:
        if self.auth == "none" and not self.is_local:
            raise ValueError(
                f"found auth none and host {self.host}; without tokens everybody who reaches it could run "
                f"code on its agents, so it must be 127.0.0.1. Use tokens: zbv-service token create."
            )
        return self

    @model_validator(mode="after")
    def _leases_outlive_heartbeats(self) -> Settings:
        if self.heartbeat_seconds > self.lease_seconds / 2:
            raise ValueError(
                f"found heartbeat_seconds {self.heartbeat_seconds:g} and lease_seconds "
                f"{self.lease_seconds:g}; "
                f"a lease must last at least two heartbeats, or healthy searches are taken away."
            )
        return self

    @model_validator(mode="after")
    def _agents_outlive_heartbeats(self) -> Settings:
        if self.agent_heartbeat_seconds > self.agent_timeout_seconds / 3:
            raise ValueError(
                f"found agent_heartbeat_seconds {self.agent_heartbeat_seconds:g} and agent_timeout_seconds "
                f"{self.agent_timeout_seconds:g}; the timeout must last at least three heartbeats, or "
                f"healthy agents are lost."
            )
        return self
