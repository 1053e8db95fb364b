"""What an operator can set: command line flags first, then ``ZBV_…`` environment variables, then defaults."""

from __future__ import annotations

import os

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from zbv_service.database.url import async_url

MEBIBYTE = 1024 * 1024


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings(BaseSettings):
    """Settings of one service process. Each field is also the environment variable ``ZBV_<FIELD>``."""

    model_config = SettingsConfigDict(env_prefix="ZBV_", extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    database: str = Field("sqlite:///zbv.db", description="URL of the database that holds all state.")
    searches: int = Field(
        default_factory=_cores,
        ge=1,
        le=1024,
        description="Searches that run at the same time, one process each.",
    )
    max_body_bytes: int = Field(8 * MEBIBYTE, ge=1, description="Largest request body, plans aside.")
    max_plan_bytes: int = Field(128 * MEBIBYTE, ge=1, description="Largest body of a plan to import.")
    max_trace_bytes: int = Field(
        32 * MEBIBYTE, ge=1, description="Largest trace of a rank, once it is decompressed."
    )
    max_cells: int = Field(
        2 * 262_144,
        ge=1,
        description="Largest pp_degree times microbatches accepted, for searches and imports.",
    )
    max_time_limit: float = Field(86_400.0, gt=0, description="Largest time_limit of a search, in seconds.")
    lease_seconds: float = Field(
        10.0, gt=0, description="How long a running search belongs to a service that gives no sign of life."
    )
    heartbeat_seconds: float = Field(2.0, gt=0, description="How often a service renews its leases.")
    max_crashes: int = Field(
        3, ge=1, description="A search whose process dies this often is failed instead of started again."
    )
    shutdown_seconds: float = Field(
        5.0, gt=0, description="How long running searches and requests get to stop on SIGTERM."
    )
    agent_heartbeat_seconds: float = Field(
        2.0, gt=0, description="How often agents should give a sign of life."
    )
    agent_timeout_seconds: float = Field(
        15.0, gt=0, description="An agent that is silent for this long is lost, and its run fails."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="Least severe log lines shown."
    )

    @field_validator("database")
    @classmethod
    def _database_is_usable(cls, value: str) -> str:
        async_url(value)
        return value

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
