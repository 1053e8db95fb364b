"""Settings: one declaration makes flags, variables and documentation; wrong values are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError
from support.paths import ROOT
from zbv_service.commands.cli import _parser, main
from zbv_service.commands.settings import declared, markdown, settings_of
from zbv_service.settings import Settings

PAGE = ROOT / "docs" / "configuration.md"
REMEDY = "put the output of `zbv-service settings --markdown` between the comments in docs/configuration.md"


def test_the_documentation_matches_the_declaration() -> None:
    found: Any = re.search(r"<!-- settings -->\n(.*)<!-- end of settings -->", PAGE.read_text(), re.DOTALL)
    assert found[1] == markdown(), REMEDY
    assert [name for name in Settings.model_fields if f"| `{name}` |" not in found[1]] == []


VALUES = {
    **{"host": "127.0.0.2", "database": "sqlite:///other.db", "allowed_hosts": "a.example,b.example"},
    **{"trusted_proxies": "10.0.0.1", "executor": "processes:2"},
    **{"tls_cert": "c.pem", "tls_key": "k.pem", "tls_ca": "a.pem"},
    **{"heartbeat_seconds": "1", "agent_heartbeat_seconds": "1"},
}
TOGETHER = {"tls_cert": ["tls_key"], "tls_key": ["tls_cert"], "tls_ca": ["tls_cert", "tls_key"]}


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_a_flag_and_a_variable_and_the_flag_wins(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (setting,) = (setting for setting in declared() if setting.name == name)
    default = getattr(Settings(), name)
    value = VALUES.get(name) or (setting.choices[-1] if setting.choices else "77")
    value = next((choice for choice in setting.choices if choice != default), value)
    for other in TOGETHER.get(name, []):
        monkeypatch.setenv(f"ZBV_{other.upper()}", VALUES[other])

    by_flag = settings_of(_parser().parse_args(["serve", setting.flag, value]))
    monkeypatch.setenv(setting.variable, value)
    by_variable = settings_of(_parser().parse_args(["serve"]))
    assert getattr(by_flag, name) == getattr(by_variable, name) != default
    if default not in (None, ()):
        flags = ["serve", setting.flag, str(default)]
        assert getattr(settings_of(_parser().parse_args(flags)), name) == default


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--tls-cert x.pem", "TLS needs both"),
        ("--tls-ca x.pem", "clients present certificates only with TLS"),
        ("--host 0.0.0.0 --auth none", "found --auth none and --host 0.0.0.0"),
        ("--database zbv.db", "must be a database URL"),
        ("--allowed-hosts zbv,a*b", "(ZBV_ALLOWED_HOSTS): found 'a*b'; * stands alone or before a domain"),
        ("--executor threads", "(ZBV_EXECUTOR): found 'threads'; must be processes"),
        ("--max-connections 0", "--max-connections (ZBV_MAX_CONNECTIONS): found 0; must be greater than"),
        ("--lease-seconds 1 --heartbeat-seconds 1", "lease_seconds must be at least 2 times"),
        ("--agent-heartbeat-seconds 1 --agent-timeout-seconds 2", "agent_timeout_seconds must be at least 3"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_the_flag(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""


def test_the_settings_command_shows_values_without_passwords(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZBV_PORT", "8001")
    monkeypatch.setenv("ZBV_DATABASE", "postgresql://zbv:hunter2@db/zbv")
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ZBV_PORT +8001$", shown, re.MULTILINE)
    assert "hunter2" not in shown
    assert shown.count("ZBV_") == len(Settings.model_fields)


def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        *("PORT=x", "PORT=-1", "PORT=70000", "DATABASE=zbv.db", "DATABASE=mysql://x/y", "SEARCHES=0"),
        *("LEASE_SECONDS=0", "LEASE_SECONDS=1e300", "LOG_LEVEL=loud", "MAX_CELLS=nan", "SESSION_HOURS=1e9"),
        *("SHUTDOWN_SECONDS=inf", "REQUEST_SECONDS=nan"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(*f"ZBV_{variable}".split("="))
            with pytest.raises(ValidationError):
                Settings()


def test_searches_share_half_of_the_memory_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for gibibytes, cores, mebibytes in ((1, 2, 512), (3.75, 2, 640), (64, 2, 768), (64, 127, 512)):
        monkeypatch.setattr("zbv_service.settings.memory_bytes", lambda size=gibibytes: int(size * 1024**3))
        monkeypatch.setattr("zbv_service.settings.cores", lambda count=cores: count)
        assert Settings().search_memory == mebibytes
