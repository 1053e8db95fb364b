"""``zbv-service token``: make, list and revoke tokens, and get links that sign a browser in.

What makes and revokes works on the database itself, also while services run on it.
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
from zbv_service.commands.ending import DONE, FAILED, WrongInput
from zbv_service.commands.files import output
from zbv_service.commands.settings import add_flags, settings_of

if TYPE_CHECKING:
    from zbv_service.database import TokenTable
    from zbv_service.records.tokens import TokenRecord

T = TypeVar("T")
_SPAN = re.compile(r"([1-9]\d{0,4})([dhm])", re.ASCII)
_UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}
_SCOPES = """\
scopes:
  read    see searches, plans, runs, agents, traces, logs and metrics
  search  start, cancel and delete searches; store plans
  agent   be an agent: offer a node, take its work, send what its ranks measured; fetch plans
  launch  start, change and cancel runs, which execute code on agents; store plans
  admin   everything

examples:
  zbv-service token create --name ci --scope read --scope search --expires 90d
  zbv-service token create --name agents --scope agent -o agents.token"""


def add_token(commands: Any) -> None:
    """Add the command."""
    token = commands.add_parser(
        "token",
        help="make, list and revoke tokens; sign a browser in",
        description="Make, list and revoke tokens, and get links that sign a browser in.",
    )
    of_token = token.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_create(of_token)
    _add_list(of_token)
    _add_revoke(of_token)
    _add_link(of_token)
    _add_show_local(of_token)


def _add_create(commands: Any) -> None:
    create = commands.add_parser(
        "create",
        help="make a token",
        description="Make a token. It is printed once, and only a hash of it is stored.",
        epilog=_SCOPES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    create.add_argument("--name", required=True, help="under which its searches and runs are noted")
    create.add_argument(
        "--scope",
        action="append",
        required=True,
        choices=("read", "search", "agent", "launch", "admin"),
        help="what it may do; may be repeated",
    )
    create.add_argument("--expires", metavar="TIME", help="such as 90d, 12h or 30m (default: never)")
    create.add_argument(
        "--max-searches",
        type=int,
        metavar="N",
        help="queued and running searches it may have (default: as the service says)",
    )
    create.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write it to a file that only you can read, and do not print it",
    )
    create.add_argument(
        "--if-missing", action="store_true", help="do nothing when a token that works has the name"
    )
    create.on_use = _add_database
    create.set_defaults(run=_create)


def _add_list(commands: Any) -> None:
    listing = commands.add_parser(
        "list", help="show all tokens", description="Show all tokens; never what they are."
    )
    listing.on_use = _add_database
    listing.set_defaults(run=_list)


def _add_revoke(commands: Any) -> None:
    revoke = commands.add_parser(
        "revoke",
        help="end a token",
        description="End a token, and the browsers' sessions that were begun with it. It stops working "
        "within about a second, in services that run, too.",
    )
    revoke.add_argument("token", metavar="NAME|ID", help="as `zbv-service token list` shows them")
    revoke.on_use = _add_database
    revoke.set_defaults(run=_revoke)


def _add_link(commands: Any) -> None:
    link = commands.add_parser(
        "link",
        help="get a link that signs a browser in",
        description="Get a link that signs one browser in, once; it may do there what the token may that "
        "this command uses.",
    )
    add_server(link)
    link.set_defaults(run=_link)


def _add_show_local(commands: Any) -> None:
    local = commands.add_parser(
        "show-local",
        help="print the token that commands use",
        description="Print the token that commands of yours send to a service, for others such as curl.",
    )
    add_server(local)
    local.set_defaults(run=_show_local)


def _add_database(command: argparse.ArgumentParser) -> None:
    add_flags(command, "database")


def _create(parsed: argparse.Namespace) -> int:
    from zbv_service.database.tokens import NameTaken
    from zbv_service.records.tokens import NewToken
    from zbv_service.security.token_text import TokenText

    name, now = _name(parsed.name), datetime.now(UTC)
    if parsed.max_searches is not None and parsed.max_searches < 1:
        raise WrongInput(f"--max-searches: found {parsed.max_searches}; must be at least 1.")
    text = TokenText.new()
    new = NewToken(
        id=text.id,
        kind="token",
        name=name,
        secret_hash=text.hash,
        scopes=tuple(dict.fromkeys(parsed.scope)),
        created_at=now,
        max_searches=parsed.max_searches,
        expires_at=None if parsed.expires is None else now + _span(parsed.expires),
    )
    with output("-" if parsed.output is None else parsed.output, private=True) as write:
        try:
            _with_table(parsed, lambda table: table.add(new), makes_one=True)
        except NameTaken:
            if parsed.if_missing:
                print(f"zbv-service: there is a token {name}; nothing to do", file=sys.stderr)
                return DONE
            raise WrongInput(
                f"a token that works has the name {name}. Choose another one, or: zbv-service token revoke "
                f"{name}"
            ) from None
        write(f"{text}\n")
    until = "" if new.expires_at is None else f", until {_moment(new.expires_at)}"
    where = "shown this once" if parsed.output is None else f"in {parsed.output}"
    print(
        f"zbv-service: token {name} ({text.id}) for {', '.join(new.scopes)}{until}; {where}", file=sys.stderr
    )
    return DONE


def _list(parsed: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "ID", "SCOPES", "STATE", "EXPIRES", "LAST USED", "SEARCHES"):
        table.add_column(heading, overflow="fold")
    now = datetime.now(UTC)
    for record in _with_table(parsed, lambda found: found.tokens()):
        most = "-" if record.max_searches is None else str(record.max_searches)
        used, expires = _moment(record.used_at), _moment(record.expires_at)
        scopes = " ".join(record.scopes)
        table.add_row(record.name, record.id, scopes, _state(record, now), expires, used, most)
    Console(highlight=False, markup=False).print(table)
    return DONE


def _revoke(parsed: argparse.Namespace) -> int:
    revoked = _with_table(parsed, lambda table: table.revoke(parsed.token))
    if not revoked:
        raise WrongInput(f"found no token {parsed.token} that works. zbv-service token list shows them.")
    for record in revoked:
        print(f"zbv-service: revoked token {record.name} ({record.id})", file=sys.stderr)
    return DONE


def _link(parsed: argparse.Namespace) -> int:
    from zbv_service.client import Client, ClientError

    try:
        with Client(parsed.server) as client:
            print(client.sign_in_link())
    except ClientError as error:
        print(f"zbv-service: {error}", file=sys.stderr)
        return FAILED
    return DONE


def _show_local(parsed: argparse.Namespace) -> int:
    from zbv_service.client import tokens

    found = tokens.find(parsed.server)
    if found is None:
        raise WrongInput(
            f"found no token for {parsed.server}: neither ZBV_TOKEN nor ZBV_TOKEN_FILE, and no service of "
            f"yours that listens there on this machine has left one."
        )
    print(found)
    return DONE


def _with_table(
    parsed: argparse.Namespace, act: Callable[[TokenTable], Awaitable[T]], *, makes_one: bool = False
) -> T:
    """Act on the tokens of the database that is meant."""
    from zbv_service.database import Database, DatabaseUnusable, TokenTable
    from zbv_service.database.url import shown_url, sqlite_file

    url = settings_of(parsed).database
    file = sqlite_file(url)
    if file is not None and not makes_one and not file.exists():
        raise WrongInput(f"there is no database {shown_url(url)}. Say which with --database or ZBV_DATABASE.")

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


def _name(text: str) -> str:
    if not 1 <= len(text) <= 100 or not text.isprintable() or text != text.strip():
        raise WrongInput(f"--name: found {text!r}; must be 1 to 100 printable characters.")
    if text == "local":
        raise WrongInput("--name: found local; that is the name of a service's own commands on its machine.")
    return text


def _span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise WrongInput(f"--expires: found {text!r}; must be a time such as 90d, 12h or 30m.")
    return int(found[1]) * _UNITS[found[2]]


def _state(record: TokenRecord, now: datetime) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "works" if record.is_live(now) else "expired"


def _moment(at: datetime | None) -> str:
    return "-" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M")
