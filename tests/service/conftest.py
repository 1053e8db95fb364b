"""Fixtures of the service's tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.databases import KINDS, Kind, PostgresDatabases, SqliteDatabases
from support.fake_kinds import kinds_of
from support.live import Command, Live, live_service
from support.postgres import SharedServer
from support.serving import DEADLINE, Service, Serving
from zbv_service.api import readiness
from zbv_service.api.routers import health
from zbv_service.app import create_app
from zbv_service.client import Client
from zbv_service.commands.cli import main
from zbv_service.database import Database, SearchTable, engine
from zbv_service.database.retention import Sweeper
from zbv_service.frontier import frontier
from zbv_service.problems import compare, estimate
from zbv_service.searches import runner
from zbv_service.security import local_token
from zbv_service.security.tokens import TokenText
from zbv_service.settings import Settings

PATIENCE = [
    (engine, "WAIT_SECONDS"),
    (readiness, "PING_SECONDS"),
    (health, "COUNT_SECONDS"),
    (estimate, "LONGEST_SECONDS"),
    (compare, "LONGEST_SECONDS"),
    (frontier, "PATIENCE_SECONDS"),
    (runner, "_STORE_SECONDS"),
    (local_token, "_LOCK_SECONDS"),
]
"""Modules, and the seconds after which they give up or answer without a part."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of a test gives nothing up because a busy machine is slow."""
    for module, name in PATIENCE:
        monkeypatch.setattr(module, name, DEADLINE)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which controllable searches and their test exchange files."""
    monkeypatch.setenv("ZBV_TEST_DIRECTORY", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> SqliteDatabases:
    return SqliteDatabases(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture
def database_url(sqlite_databases: SqliteDatabases, tmp_path: Path) -> str:
    """An empty SQLite database with all tables. Tests of both kinds of databases are in contract/."""
    return sqlite_databases.migrated(tmp_path)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresDatabases]:
    """A real PostgreSQL server, one for all processes of the session."""
    if url := os.environ.get("ZBV_TEST_POSTGRES"):
        yield PostgresDatabases(url)
        return
    place = tmp_path_factory.getbasetemp()
    shared = SharedServer(place.parent if "PYTEST_XDIST_WORKER" in os.environ else place)
    yield PostgresDatabases(shared.url)
    shared.close()


@pytest.fixture(scope="session")
def postgres_database(postgres: PostgresDatabases) -> Iterator[str]:
    """A PostgreSQL database of this process, with all tables; for :func:`any_database_url`."""
    with postgres.migrated() as url:
        yield url


@pytest.fixture(params=KINDS)
def any_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind, with all tables."""
    kind: Kind = request.param
    if kind == "sqlite":
        sqlite: SqliteDatabases = request.getfixturevalue("sqlite_databases")
        yield sqlite.migrated(tmp_path)
        return
    url: str = request.getfixturevalue("postgres_database")
    PostgresDatabases.clear(url)
    yield url


@pytest.fixture
async def databases(any_database_url: str) -> AsyncIterator[list[Database]]:
    """The connections of four services to the same empty database of each kind."""
    opened = [Database(any_database_url) for _ in range(4)]
    yield opened
    for each in opened:
        await each.close()


@pytest.fixture
def database(databases: list[Database]) -> Database:
    """An empty database of each kind."""
    return databases[0]


@pytest.fixture
def second(databases: list[Database]) -> Database:
    """The connections of another service to the same database."""
    return databases[1]


@pytest.fixture
def table(database: Database) -> SearchTable:
    """The searches of an empty database of each kind."""
    return SearchTable(database)


@pytest.fixture(params=KINDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of each kind, without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/zbv.db"
        return
    postgres: PostgresDatabases = request.getfixturevalue("postgres")
    with postgres.empty() as url:
        yield url


@pytest.fixture
def settings(directory: Path, database_url: str) -> Settings:
    return Settings(
        auth="none",
        allowed_hosts=("zbv",),
        database=database_url,
        searches=2,
        heartbeat_seconds=0.2,
        computation_seconds=DEADLINE,
        agent_timeout_seconds=3600.0,  # computations have low priority, so they may take long
        max_body_bytes=100_000,
        max_plan_bytes=200_000,
        max_cells=10_000,
    )


@pytest.fixture
async def elsewhere(settings: Settings) -> AsyncIterator[Database]:
    """The connections of another service to the database of :func:`serving`."""
    opened = Database(settings.database)
    yield opened
    await opened.close()


@pytest.fixture
def serving(settings: Settings, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Starts applications on the test's database, without the sweep that would be a sixth of their work."""

    async def nothing(_sweeper: Sweeper) -> None:
        pass

    monkeypatch.setattr(Sweeper, "start", nothing)

    @asynccontextmanager
    async def start(
        search: str, local_token: TokenText | None = None, **changes: Any
    ) -> AsyncIterator[Service]:
        chosen, kinds = settings.model_copy(update=changes), kinds_of(search, directory)
        app = create_app(chosen, kinds=kinds, local_token=local_token)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://zbv", timeout=DEADLINE) as http,
        ):
            yield Service(app, http)

    return start


@pytest.fixture
async def service(serving: Serving) -> AsyncIterator[Service]:
    """A service whose searches end at once."""
    async with serving("immediate") as started:
        yield started


@pytest.fixture
async def honest(serving: Serving) -> AsyncIterator[Service]:
    """A service whose searches end at once with a plan that has its true metrics."""
    async with serving("honest") as started:
        yield started


@pytest.fixture
async def held(serving: Serving) -> AsyncIterator[Service]:
    """A service whose searches report a plan, and wait until they are released or cancelled."""
    async with serving("held") as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of :func:`live`, whose searches end as soon as there is a file ``release``."""
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """A service that listens. Its searches report a plan, and wait until they are released or cancelled."""
    with live_service(folder, "held", searches=4, heartbeat_seconds=0.2) as found:
        yield found


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with Client(live.address, timeout=DEADLINE) as found:
        yield found


@pytest.fixture
def command(live: Live, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of :func:`live` in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([*map(str, arguments), "--server", live.address])
        written = capsys.readouterr()
        return status, written.out, written.err

    return run


@pytest.fixture
async def guarded(serving: Serving) -> AsyncIterator[Service]:
    """A service that requires tokens."""
    async with serving("immediate", auth="tokens") as started:
        yield started
