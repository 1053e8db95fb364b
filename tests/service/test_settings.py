"""Settings: flags win over variables, variables over defaults, and wrong ones are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from zbv_service.settings import Settings


def test_a_variable_replaces_a_default_and_an_argument_replaces_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Settings().port == 8000
    monkeypatch.setenv("ZBV_PORT", "8001")
    assert Settings().port == 8001
    assert Settings(port=8002).port == 8002


def test_the_default_serves_this_machine_only_and_keeps_state_here() -> None:
    settings = Settings()
    assert (settings.host, settings.database) == ("127.0.0.1", "sqlite:///zbv.db")
    assert settings.searches >= 1


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_says_what_it_is_for(name: str) -> None:
    assert Settings.model_fields[name].description


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "x"),
        ("PORT", "-1"),
        ("DATABASE", "zbv.db"),
        ("SEARCHES", "0"),
        ("LEASE_SECONDS", "0"),
        ("LOG_LEVEL", "loud"),
        ("MAX_CELLS", "nan"),
        ("SESSION_HOURS", "1e9"),
        ("SHUTDOWN_SECONDS", "inf"),
        ("LEASE_SECONDS", "1e300"),
        ("REQUEST_SECONDS", "nan"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"ZBV_{name}", value)
    with pytest.raises(ValidationError):
        Settings()


def test_a_lease_outlives_its_heartbeat() -> None:
    with pytest.raises(ValidationError, match="lease_seconds must be at least 2 times"):
        Settings(lease_seconds=1.0, heartbeat_seconds=1.0)


def test_an_agent_is_not_lost_over_one_missed_heartbeat() -> None:
    with pytest.raises(ValidationError, match="agent_timeout_seconds must be at least 3 times"):
        Settings(agent_heartbeat_seconds=1.0, agent_timeout_seconds=2.0)
