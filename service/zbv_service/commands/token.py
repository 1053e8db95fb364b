"""``zbv-service token``: create, list and revoke tokens, and create links that sign a browser in.

``create``, ``list`` and ``revoke`` use the database directly, even while services use it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import (
    DONE,
    FAILED,
    Stop,
    WrongInput,
    at_least_one,
    connected,
    output,
    print_table,
)
from zbv_service.commands.settings import add_flags, settings_of

if TYPE_CHECKING:
    from zbv_service.security.tokens import Token, TokenTable

T = TypeVar("T")
_DURATION = re.compile(r"([1-9]\d{0,4})([dhm])", re.ASCII)
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}
_SCOPES = """\
scopes:
  read    read searches, plans, runs, agents, traces, logs and metrics
  search  start, cancel and delete searches; store plans
  agent   act as an agent: offer a node, take its work, send its measurements; fetch plans
  launch  start, change and cancel runs, which execute code on agents; store plans
  admin   everything

examples:
  zbv-service token create --name ci --scope read --scope search --expires 90d
  zbv-service token create --name agents --scope agent -o agents.token"""


_SHOW_LOCAL_EXAMPLE = """\
example:
  curl -H "Authorization: Bearer $(zbv-service token show-local)" http://127.0.0.1:8000/v1/searches"""


def add_token(commands: Any) -> None:
    """Add the command."""
    token = commands.add_parser(
        "token",
        help="create, list and revoke tokens; sign a browser in",
        description="Create, list and revoke tokens, and create links that sign a browser in.",
    )
    actions = token.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_create(actions)
    listing = actions.add_parser(
        "list", help="show all tokens", description="Show all tokens, without their secrets."
    )
    listing.on_use = _add_database
    listing.set_defaults(run=_list)
    revoke = actions.add_parser(
        "revoke",
        help="revoke a token",
        description="Revoke a token and the browser sessions that began with it. It stops working within "
        "about a second, even in running services.",
    )
    revoke.add_argument("token", metavar="NAME|ID", help="name or id from `zbv-service token list`")
    revoke.on_use = _add_database
    revoke.set_defaults(run=_revoke)
    link = actions.add_parser(
        "link",
        help="create a link that signs a browser in",
        description="Print a link that signs one browser in, once, with the permissions of this command's "
        "token.",
    )
    add_server(link)
    link.set_defaults(run=_link)
    local = actions.add_parser(
        "show-local",
        help="print the token that commands use",
        description="Print the token that your commands send to a service, for programs such as curl.",
        epilog=_SHOW_LOCAL_EXAMPLE,
    )
    add_server(local)
    local.set_defaults(run=_show_local)


def _add_create(commands: Any) -> None:
    create = commands.add_parser(
        "create",
        help="create a token",
        description="Create a token and print it once. The service stores only a hash of it.",
        epilog=_SCOPES,
    )
    create.add_argument(
        "--name", required=True, help="name of the token, recorded with its searches and runs"
    )
    create.add_argument(
        "--scope",
        action="append",
        required=True,
        choices=("read", "search", "agent", "launch", "admin"),
        help="permission; may be repeated",
    )
    create.add_argument(
        "--expires",
        metavar="TIME",
        type=_duration,
        help="lifetime such as 90d, 12h or 30m (default: unlimited)",
    )
    create.add_argument(
        "--max-searches",
        type=at_least_one,
        metavar="N",
        help="queued and running searches it may have at a time (default: the service's limit)",
    )
    create.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write the token to a file that only you can read instead of printing it",
    )
    create.add_argument(
        "--if-missing", action="store_true", help="do nothing when a valid token has this name"
    )
    create.on_use = _add_database
    create.set_defaults(run=_create)


def _add_database(command: argparse.ArgumentParser) -> None:
    add_flags(command, "database")


def _create(parsed: argparse.Namespace) -> int:
    from zbv_service.security.tokens import Token, TokenNameTaken, TokenText

    name, now = _name(parsed.name), datetime.now(UTC)
    text = TokenText.new()
    new = Token(
        id=text.id,
        kind="token",
        name=name,
        secret_hash=text.hash,
        scopes=tuple(dict.fromkeys(parsed.scope)),
        created_at=now,
        max_searches=parsed.max_searches,
        expires_at=None if parsed.expires is None else now + parsed.expires,
    )
    with output("-" if parsed.output is None else parsed.output, private=True) as write:
        try:
            _with_table(parsed, lambda table: table.add(new), creates=True)
        except TokenNameTaken:
            if parsed.if_missing:
                print(f"zbv-service: token {name} exists; nothing to do", file=sys.stderr)
                return DONE
            raise WrongInput(
                f"--name: a valid token is already called {name}. Choose another name, or revoke it: "
                f"zbv-service token revoke {name}"
            ) from None
        write(f"{text}\n")
    until = "" if new.expires_at is None else f", until {_moment(new.expires_at)}"
    where = "shown only once" if parsed.output is None else f"in {parsed.output}"
    print(
        f"zbv-service: token {name} ({text.id}) for {', '.join(new.scopes)}{until}; {where}", file=sys.stderr
    )
    return DONE


def _list(parsed: argparse.Namespace) -> int:
    now, rows = datetime.now(UTC), []
    for record in _with_table(parsed, lambda found: found.tokens()):
        most = "-" if record.max_searches is None else str(record.max_searches)
        used, expires = _moment(record.used_at), _moment(record.expires_at)
        scopes = " ".join(record.scopes)
        rows.append((record.name, record.id, scopes, _state(record, now), expires, used, most))
    print_table(("NAME", "ID", "SCOPES", "STATE", "EXPIRES", "LAST USED", "SEARCHES"), rows)
    return DONE


def _revoke(parsed: argparse.Namespace) -> int:
    revoked = _with_table(parsed, lambda table: table.revoke(parsed.token))
    if not revoked:
        raise WrongInput(f"found no valid token {parsed.token}. To list all tokens: zbv-service token list")
    for record in revoked:
        print(f"zbv-service: revoked token {record.name} ({record.id})", file=sys.stderr)
    return DONE


def _link(parsed: argparse.Namespace) -> int:
    with connected(parsed.server) as client:
        print(client.sign_in_link())
    return DONE


def _show_local(parsed: argparse.Namespace) -> int:
    from zbv_service.client import tokens

    found = tokens.find(parsed.server)
    if found is None:
        raise WrongInput(
            f"found no token for {parsed.server}: neither ZBV_TOKEN nor --token-file (ZBV_TOKEN_FILE) is "
            f"set, and no service of this user runs there on this machine."
        )
    print(found)
    return DONE


def _with_table(
    parsed: argparse.Namespace, act: Callable[[TokenTable], Awaitable[T]], *, creates: bool = False
) -> T:
    """Call a function with the database's tokens. Only ``creates`` may create a new SQLite file."""
    from zbv_service.database import Database, DatabaseAway, DatabaseUnusable
    from zbv_service.security.tokens import TokenTable
    from zbv_service.settings import shown_url, sqlite_file

    url = settings_of(parsed).database
    file = sqlite_file(url)
    if file is not None and not creates and not file.exists():
        raise WrongInput(f"--database (ZBV_DATABASE): there is no database {shown_url(url)}.")

    async def run() -> T:
        database = Database(url)
        try:
            await database.migrate()
            return await act(TokenTable(database))
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except DatabaseUnusable as error:
        raise WrongInput(str(error)) from None
    except DatabaseAway as error:
        full = "Check its disk, which may be full, and try again."
        raise Stop(FAILED, f"cannot use {shown_url(url)}. {error} {full}") from None


def _name(text: str) -> str:
    if not 1 <= len(text) <= 100 or not text.isprintable() or text != text.strip():
        raise WrongInput(f"--name: found {text!r}; must be 1 to 100 printable characters.")
    if text == "local":
        raise WrongInput("--name: found local, which is reserved for commands on the service's own machine.")
    return text


def _duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; must be a time such as 90d, 12h or 30m.")
    return int(found[1]) * _UNITS[found[2]]


def _state(record: Token, now: datetime) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "valid" if record.is_live(now) else "expired"


def _moment(at: datetime | None) -> str:
    return "-" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M")
