"""Tokens: their text, storage, caching and expiry, and the commands for them."""

from __future__ import annotations

import asyncio
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from support.tokens import add_token
from zbv_service.commands.cli import main
from zbv_service.database import Database, DatabaseAway
from zbv_service.security import access as access_module
from zbv_service.security.access import FRESH_SECONDS, STALE_SECONDS, Access, Unauthenticated
from zbv_service.security.tokens import Grant, TokenNameTaken, TokenTable, TokenText


async def grant_to(text: str, access: Access) -> Grant | None:
    """The grant of a token; None if it is refused."""
    try:
        return await access.check(text)
    except Unauthenticated:
        return None


def test_a_token_is_parsed_and_hides_its_secret_and_other_text_is_no_token() -> None:
    made = TokenText.new()
    assert re.fullmatch(r"zbv_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", str(made))
    assert TokenText.parse(str(made)) == made
    assert made.secret not in repr(made)
    assert made.secret not in made.hash
    assert TokenText.new().hash != made.hash
    for other in ("", "zbv", "zbv__", "zbv_0123456789ab_" + "a" * 42, "x" * 10_000, "zbv_é_ü"):
        assert TokenText.parse(other) is None


async def test_a_token_works_until_it_is_revoked_or_expires(database: Database) -> None:
    table, now = TokenTable(database), 1000.0
    access = Access(table, clock=lambda: now)
    text = await add_token(database, "read", "search", name="ci", max_searches=7)
    grant: Any = await grant_to(text, access)
    assert (grant.name, grant.scopes, grant.max_searches) == ("ci", frozenset({"read", "search"}), 7)
    (record,) = await table.tokens()
    secret = text.removeprefix(f"zbv_{record.id}_")  # may contain "_" itself
    assert secret not in repr(record)
    assert record.secret_hash == TokenText(record.id, secret).hash
    with pytest.raises(TokenNameTaken):
        await add_token(database, "read", name="ci")
    assert [record.name for record in await table.revoke("ci")] == ["ci"]
    assert await grant_to(text, access) is not None, "it is cached for a moment"
    now += FRESH_SECONDS + 0.01
    assert await grant_to(text, access) is None
    assert await table.revoke("ci") == []
    assert await grant_to(await add_token(database, "read", name="ci", seconds=60), access) is not None
    assert await grant_to(await add_token(database, "read", name="b", seconds=-1), access) is None
    assert [record.is_live(datetime.now(UTC)) for record in await table.tokens()] == [False, True, False]
    await access.close()


async def test_thousands_of_requests_cost_one_query_and_the_number_of_cached_tokens_is_limited(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "REMEMBERED", 2)
    access = Access(table := TokenTable(database), clock=lambda: 1000.0)
    looks: list[str] = []
    live = table.live

    async def counted(token_id: str, local_id: str | None) -> object:
        looks.append(token_id)
        return await live(token_id, local_id)

    monkeypatch.setattr(table, "live", counted)
    three = [await add_token(database, "read", name=name) for name in "abc"]
    ids = [token.split("_")[1] for token in three]
    for token in (*three, *reversed(three)):
        grants = await asyncio.gather(*(grant_to(token, access) for _ in range(700)))
        assert None not in grants
    assert looks == [*ids, ids[0]], "only the least recent was dropped"
    await access.close()


async def test_the_last_use_of_a_token_is_stored_at_intervals_and_it_works_while_the_database_is_away(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, now = TokenTable(database), 1000.0
    access = Access(table, clock=lambda: now)
    text, used = await add_token(database, "read"), []
    for _ in range(2):
        assert await grant_to(text, access) is not None
        await access.close()
        used += [record.used_at for record in await table.tokens()]
        now += 10
    assert used[0] == used[1] is not None

    async def away(*_: object) -> None:
        raise DatabaseAway("away")

    monkeypatch.setattr(table, "live", away)
    now += STALE_SECONDS - 11
    assert await grant_to(text, access) is not None
    now += 2
    for each in (text, str(TokenText.new())):
        with pytest.raises(DatabaseAway):
            await grant_to(each, access)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit status and output of ``zbv-service token``."""
    try:
        status: object = main(["token", *arguments])
    except SystemExit as ended:  # by argparse
        status = ended.code
    return status, *capsys.readouterr()


@pytest.fixture
def url(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ZBV_DATABASE", database_url)
    return database_url


def test_the_command_creates_lists_and_revokes_tokens(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path
) -> None:
    scopes = ("--scope", "read", "--scope", "search")
    status, printed, said = run(capsys, "create", "--name", "ci", *scopes, "--expires", "90d")
    token: Any = TokenText.parse(printed.strip())
    assert (status, token.secret in said) == (0, False)

    engine = create_engine(url)
    with engine.connect() as connection:
        stored = connection.execute(text("SELECT * FROM tokens")).one()._asdict()
    engine.dispose()
    assert stored["secret_hash"] == token.hash
    assert token.secret not in str(stored)
    left = datetime.fromisoformat(stored["expires_at"]) - datetime.fromisoformat(stored["created_at"])
    assert left == timedelta(days=90)

    listed = run(capsys, "list")[1]
    assert (token.id in listed, token.secret in listed) == (True, False)
    again = ("create", "--name", "ci", "--scope", "read")
    assert (run(capsys, *again)[0], run(capsys, *again, "--if-missing")[:2]) == (2, (0, ""))
    assert run(capsys, "revoke", token.id)[0] == 0
    assert "revoked" in run(capsys, "list")[1]
    remedy = "zbv-service: found no valid token ci. To list all tokens: zbv-service token list\n"
    assert run(capsys, "revoke", "ci") == (2, "", remedy)

    path = tmp_path / "agents.token"
    path.write_text("readable by everyone")
    path.chmod(0o644)
    status, printed, said = run(capsys, "create", "--name", "agents", "--scope", "agent", "-o", str(path))
    assert (status, printed) == (0, "")
    token = TokenText.parse(path.read_text().strip())
    assert token.secret not in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_wrong_input_creates_no_token(capsys: pytest.CaptureFixture[str], url: str) -> None:
    for arguments, complaint in (
        (["--name", " x"], "must be 1 to 100 printable characters"),
        (["--name", "local"], "found local"),
        (["--name", "x", "--expires", "3y"], "must be a time such as 90d"),
        (["--name", "x", "--expires", "0d"], "must be a time such as 90d"),
        (["--name", "x", "--max-searches", "0"], "--max-searches: found '0'; must be a whole number"),
    ):
        status, out, err = run(capsys, "create", "--scope", "read", *arguments)
        assert (status, out, complaint in err) == (2, "", True), err
    assert run(capsys, "list")[1].count("\n") == 1, "only the heading"


def test_an_unusable_database_is_named_and_a_missing_one_is_not_created(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["token", "list", "--database", f"sqlite:///{tmp_path}/none.db"]) == 2
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()

    async def full(*_: object) -> None:
        raise DatabaseAway("The database does not answer: database or disk is full.")

    monkeypatch.setattr(TokenTable, "add", full)
    status, out, err = run(capsys, "create", "--name", "ci", "--scope", "read")
    assert (status, out) == (1, "")
    assert "disk is full" in err
    assert url in err
