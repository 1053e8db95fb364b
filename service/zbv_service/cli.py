"""The command ``zbv-service``. Heavy parts are imported by the commands that need them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver import __version__

from zbv_service.run_cli import WrongInput, add_run

if TYPE_CHECKING:
    from zbv_service.client import Client, Search
    from zbv_service.settings import Settings

DONE, FAILED, WRONG_INPUT, INFEASIBLE = 0, 1, 2, 3
"""Exit statuses; 0, 2 and 3 are those of ``zbv``."""

DEFAULT_SERVER = "http://127.0.0.1:8000"

_EPILOG = """\
exit status: 0 done; 1 the service cannot be reached or failed; 2 the input is wrong;
3 no plan fits the memory limit."""


class _Stop(Exception):
    """Ends a command with a message and a status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except _Stop as stop:
        print(f"zbv-service: {stop}", file=sys.stderr)
        return stop.status
    except WrongInput as error:
        print(f"zbv-service: {error}", file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away; Python must not complain about it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zbv-service",
        description="Plans zero-bubble V schedules as a service.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zbv-service {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_submit(commands)
    add_run(commands, os.environ.get("ZBV_SERVER", DEFAULT_SERVER), _read_json_file)
    openapi = commands.add_parser(
        "openapi", help="print the API's OpenAPI document", description="Print the API's OpenAPI document."
    )
    openapi.set_defaults(run=_openapi)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the service",
        description="Run the service until SIGTERM or Ctrl-C. Searches that run then are finished after the "
        "next start.",
        epilog="Every setting is also an environment variable: ZBV_HOST, ZBV_PORT, ZBV_DATABASE, "
        "ZBV_SEARCHES, … A flag wins.",
    )
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    serve.add_argument(
        "--port", type=int, help="port to listen on (default: 8000; 0 takes a free one and prints it)"
    )
    serve.add_argument(
        "--database", metavar="URL", help="where all state is kept (default: sqlite:///zbv.db, in ./zbv.db)"
    )
    serve.add_argument(
        "--searches",
        type=int,
        metavar="N",
        help="searches that run at the same time, one process each (default: one per core)",
    )
    serve.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="least severe lines (default: info)",
    )
    serve.set_defaults(run=_serve)


def _add_submit(commands: Any) -> None:
    submit = commands.add_parser(
        "submit",
        help="have a service plan a problem",
        description="Submit a problem to a running service, follow the search, and write the plan.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    submit.add_argument("problem", help="problem file (JSON); - is standard input")
    submit.add_argument(
        "--server",
        metavar="URL",
        default=os.environ.get("ZBV_SERVER", DEFAULT_SERVER),
        help=f"address of the service (default: $ZBV_SERVER, or {DEFAULT_SERVER})",
    )
    submit.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="where to write the plan (default: -)"
    )
    submit.add_argument("--effort", choices=("quick", "standard", "thorough"), default="standard")
    submit.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop the search after this long")
    submit.add_argument("--seed", type=int, default=0)
    submit.set_defaults(run=_submit)


def _serve(parsed: argparse.Namespace) -> int:
    import uvicorn

    # Before the server takes signals over, and when it hands them back after its graceful end.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    settings = _settings(parsed)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("alembic", "aiosqlite", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

    from zbv_service.app import create_app

    _require_database(settings)

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"zbv-service: listening on {_address(listener)}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Agents wait for work for seconds; the server would wait as long for them.
            app.state.rooms.dispatcher.hang_up()
            await super().shutdown(sockets)

    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
        lifespan="on",
    )
    with _listen(settings.host, settings.port) as listener:
        server = AnnouncedServer(config)
        server.run(sockets=[listener])
    # Uvicorn logs why a start failed, and returns.
    return DONE if server.started else FAILED


def _require_database(settings: Settings) -> None:
    """Open the database once before the server starts: its own way to fail is a traceback."""
    import asyncio

    from zbv_service.database import Database, DatabaseUnusable

    async def migrate() -> None:
        database = Database(settings.database)
        try:
            await database.migrate()
        finally:
            await database.close()

    try:
        asyncio.run(migrate())
    except DatabaseUnusable as error:
        raise _Stop(WRONG_INPUT, str(error)) from None


def _exit(_number: int, _frame: object) -> None:
    sys.exit(DONE)


def _settings(parsed: argparse.Namespace) -> Settings:
    from pydantic import ValidationError

    from zbv_service.settings import Settings

    names = ("host", "port", "database", "searches", "log_level")
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
        raise _Stop(WRONG_INPUT, "a setting is wrong (flag or ZBV_ variable): " + "; ".join(lines)) from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise _Stop(
            WRONG_INPUT, f"cannot listen on {host} port {port}: {error.strerror}. Choose others (--port 0)."
        ) from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _submit(parsed: argparse.Namespace) -> int:
    from zbv_service.client import Client, ClientError, InvalidRequest, SearchEnded

    problem = _read_json_file(parsed.problem)
    options = {"effort": parsed.effort, "time_limit": parsed.time_limit, "seed": parsed.seed}
    try:
        with Client(parsed.server) as client:
            found = _follow(client, client.submit(problem, options))
            document = client.plan_document(str(found.plan_id))
    except InvalidRequest as error:
        lines = [f"  {issue}" for issue in error.issues] or [f"  {error.detail}"]
        raise _Stop(WRONG_INPUT, "\n".join([f"{parsed.problem} was refused:", *lines])) from None
    except SearchEnded as ended:
        status = INFEASIBLE if ended.search.state == "infeasible" else FAILED
        raise _Stop(status, str(ended)) from None
    except ClientError as error:
        raise _Stop(FAILED, str(error)) from None
    _write(parsed.output, json.dumps(document, ensure_ascii=False) + "\n")
    return DONE


def _read_json_file(name: str) -> Any:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise _Stop(WRONG_INPUT, f"cannot read {name}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise _Stop(WRONG_INPUT, f"{name} is not UTF-8 text; it must be a JSON document.") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _Stop(WRONG_INPUT, f"{name} is not JSON: {error}.") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _follow(client: Client, search: Search) -> Search:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task(f"search {search.id}: {search.state}", total=None)

        def show(seen: Search) -> None:
            text = f"search {seen.id}: {seen.state}"
            if seen.objective is not None:
                text += f", objective {seen.objective:.6g}"
            if seen.gap is not None:
                text += f", gap {100 * seen.gap:.2f} %"
            progress.update(shown, description=text)

        found = client.wait(search.id, show)
    address = f"{client.base_url}/plans/{found.plan_id}"
    print(f"plan {found.plan_id}: objective {found.objective:.9g}, {address}", file=sys.stderr)
    return found


def _write(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _Stop(WRONG_INPUT, f"cannot write {name}: {error.strerror}.") from None


def _openapi(_parsed: argparse.Namespace) -> int:
    from zbv_service.app import create_app

    print(json.dumps(create_app().openapi(), indent=2, ensure_ascii=False))
    return DONE
