"""Sign-in with a browser, and the local token for commands on the machine of the service."""

from __future__ import annotations

import platform
import re
import stat
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import uvicorn
from sqlalchemy import select, update
from support.serving import PROBLEM, Service, Serving
from support.tokens import add, bearer, kind_of
from zbv_service.client import tokens
from zbv_service.client.tokens import CredentialsUnusable
from zbv_service.commands import serving as commands
from zbv_service.database.models import TokenRow
from zbv_service.security.local_token import kept_token, left_behind
from zbv_service.security.tokens import TokenTable, TokenText

LOCAL = TokenText.new()
PAGE = {"Accept": "text/html,application/xhtml+xml"}
OURS = {"Sec-Fetch-Site": "same-origin"}


@asynccontextmanager
async def started(serving: Serving, local: TokenText | None) -> AsyncIterator[Service]:
    """A service that requires tokens and has this local token."""
    async with serving("immediate", local, auth="tokens") as service:
        service.http.base_url = httpx.URL("http://zbv:8000")
        yield service


@pytest.fixture
async def service(serving: Serving) -> AsyncIterator[Service]:
    async with started(serving, LOCAL) as found:
        yield found


async def link(service: Service, fields: dict[str, str] | None = None) -> str:
    answer = await service.http.post("/v1/sign-in-links", headers=fields or bearer(str(LOCAL)))
    assert answer.status_code == 201, answer.text
    url: str = answer.json()["url"]
    assert url.startswith("http://zbv:8000/sign-in?token=zbv_")
    return url.removeprefix("http://zbv:8000")


async def follow(
    service: Service, url: str, fields: dict[str, str] = OURS, site: str = "http://zbv:8000"
) -> httpx.Response:
    """Open a link, and press the button of its page."""
    page = await service.http.get(f"{site}{url}", headers=PAGE)
    assert (page.status_code, "set-cookie" in page.headers) == (200, False)
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text))
    return await service.http.post(f"{site}/sign-in", data=form, headers=fields)


async def submit(service: Service, **fields: str) -> httpx.Response:
    return await service.http.post("/v1/searches", json={"problem": PROBLEM}, headers=fields)


async def test_the_local_token_has_every_scope(service: Service) -> None:
    assert (await submit(service, **bearer(str(LOCAL)))).status_code == 202
    other = TokenText(LOCAL.id, TokenText.new().secret)
    assert (await submit(service, **bearer(str(other)))).status_code == 401


async def test_a_link_starts_one_session(service: Service) -> None:
    url = await link(service)
    for _ in range(3):  # a program that shows previews of links
        assert (await service.http.get(url, headers=PAGE)).status_code == 200
    answer = await follow(service, url)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("zbv-session-8000=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "Signed in as local" in (await service.http.get("/", headers=PAGE)).text

    leading = await follow(service, f"{await link(service)}&next=/plans/abc")
    assert leading.headers["location"] == "/plans/abc"

    service.http.cookies.clear()
    again = await follow(service, url)
    assert (again.status_code, "set-cookie" in again.headers) == (401, False)
    assert "was already used" in again.text


async def test_a_wrong_link_starts_no_session_and_a_link_is_no_token(service: Service) -> None:
    token = (await add(service, "admin"))["Authorization"].removeprefix("Bearer ")
    right = await link(service)
    for text in (str(TokenText.new()), "nonsense", token):
        answer = await follow(service, f"/sign-in?token={text}")
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert (await service.http.get("/", headers=bearer(right.partition("=")[2]))).status_code == 401
    assert "set-cookie" in (await follow(service, right)).headers
    assert (await service.http.get("/v1/searches", auth=("user", "of a proxy"))).is_success


async def test_sign_in_needs_a_valid_token_and_never_redirects_to_another_site(service: Service) -> None:
    answer = await service.http.post("/sign-in", data={"token": "<b>wrong</b>"}, headers=OURS)
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    assert "<b>wrong" not in answer.text
    for elsewhere in ("//evil.example", "https://evil.example", "/\\evil.example", "x", "/\n/"):
        data = {"token": str(LOCAL), "next": elsewhere}
        answer = await service.http.post("/sign-in", data=data, headers=OURS)
        assert (answer.status_code, answer.headers["location"]) == (303, "/"), elsewhere


@pytest.mark.parametrize("behind", ["local", "token"])
async def test_a_session_creates_no_credentials(service: Service, behind: str) -> None:
    """Such credentials could outlive the session."""
    await follow(service, await link(service, await add(service, "admin") if behind == "token" else None))
    (session,) = service.http.cookies.values()
    for fields in (OURS, bearer(session)):
        refused = await service.http.post("/v1/sign-in-links", headers=fields)
        assert (refused.status_code, kind_of(refused)) == (403, "insufficient-scope")
    refused = await service.http.post("/sign-in", data={"token": session}, headers=OURS)
    assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert "session cannot create" in refused.text
    assert (await follow(service, f"/sign-in?token={session}")).status_code == 401
    async with service.app.state.application.database.writing() as stored:
        kinds = await stored.scalars(select(TokenRow.kind).where(TokenRow.kind != "token"))
        assert sorted(kinds) == ["link", "session"], "only those that this test created"


@pytest.mark.parametrize("end", ["expired", "revoked"])
async def test_a_session_ends_with_its_token(service: Service, end: str) -> None:
    fields = await add(service, "read", name="carol", seconds=3600)
    url = await link(service, fields)
    await follow(service, await link(service, fields))
    assert (await service.http.get("/v1/searches")).is_success
    assert kind_of(await submit(service, **OURS)) == "insufficient-scope", "as its token"
    application = service.app.state.application
    if end == "revoked":
        await TokenTable(application.database).revoke("carol")
    else:
        async with application.database.writing() as session:
            of_carol = update(TokenRow).where(TokenRow.kind == "token")
            await session.execute(of_carol.values(expires_at=datetime.now(UTC)))
    application.access._known.clear()
    assert (await service.http.get("/v1/searches")).status_code == 401
    assert (await follow(service, url)).status_code == 401


async def test_a_session_of_a_local_token_works_only_with_that_token(
    service: Service, serving: Serving
) -> None:
    url = await link(service)
    await follow(service, await link(service))
    kept = dict(service.http.cookies)
    for local, expected in ((LOCAL, True), (TokenText.new(), False), (None, False)):
        async with started(serving, local) as later:
            later.http.cookies.update(kept)
            assert (await later.http.get("/v1/searches")).is_success == expected
            if not expected:
                data = {"link": url.partition("=")[2]}
                assert (await later.http.post("/sign-in", data=data, headers=OURS)).status_code == 401


async def test_other_sites_cannot_use_the_session(service: Service) -> None:
    """Nor sign a browser in under another name, whose user would store things for the attacker."""
    await follow(service, await link(service))
    url = await link(service)
    other = ("http://evil.example", "http://zbv:8001", "null")
    sites: list[dict[str, str]] = [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {}]
    for fields in [*sites, *({"Origin": origin} for origin in other)]:
        refused = await submit(service, **fields)
        assert (refused.status_code, kind_of(refused)) == (403, "other-origin"), fields
        assert (await service.http.post("/sign-out", headers=fields)).status_code == 403
        answer = await service.http.post("/sign-in", data={"token": str(LOCAL)}, headers=fields)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
        assert (await follow(service, url, fields)).status_code == 403
    assert (await submit(service, **OURS)).status_code == 202
    assert (await submit(service, Origin="http://zbv:8000")).status_code in (200, 202)
    assert (await follow(service, url)).status_code == 303, "it is not used up"


async def test_a_session_ends_with_the_next_one_or_when_it_is_signed_out(service: Service) -> None:
    await follow(service, await link(service))
    first = dict(service.http.cookies)
    await follow(service, await link(service))
    second = dict(service.http.cookies)
    assert (await service.http.get("/", headers=PAGE)).status_code == 200
    answer = await service.http.post("/sign-out", headers=OURS)
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    assert not service.http.cookies
    for ended in (first, second):
        service.http.cookies.update(ended)
        assert (await service.http.get("/v1/searches")).status_code == 401
    # Open pages keep polling with the old cookie, which must not keep the browser from signing in.
    page = await service.http.get("/", headers=PAGE)
    assert (page.status_code, 'name="token"' in page.text) == (401, True)
    answer = await service.http.post("/sign-in", data={"token": str(LOCAL)}, headers=OURS)
    assert answer.status_code == 303


async def test_a_page_reached_from_another_site_reloads_to_send_the_cookie(service: Service) -> None:
    """The browser withholds a strict cookie from links of other sites, but sends it when the page reloads."""
    foreign = await service.http.get("/", headers={**PAGE, "Sec-Fetch-Site": "cross-site"})
    own = await service.http.get("/", headers={**PAGE, "Sec-Fetch-Site": "same-origin"})
    assert ('http-equiv="refresh"' in foreign.text, 'http-equiv="refresh"' in own.text) == (True, False)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("ZBV_TOKEN", "ZBV_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_commands_find_the_token_of_a_service_of_their_user(runtime: Path) -> None:
    with left_behind(8123, "zbv_local") as path:
        assert path == runtime / "zbv" / "token-8123"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for server in ("http://127.0.0.1:8123", "http://localhost:8123/", "https://[::1]:8123"):
            assert tokens.find(server) == "zbv_local"
        assert tokens.find("http://127.0.0.1:8124") is None
        assert tokens.find("http://planner:8123") is None, "the token is only for local addresses"
    assert tokens.find("http://127.0.0.1:8123") is None
    assert list(path.parent.iterdir()) == []


def test_a_stale_token_file_is_replaced_and_a_newer_one_is_kept(runtime: Path) -> None:
    stale = runtime / "zbv" / "token-8123"
    stale.parent.mkdir()
    stale.write_text("zbv_stale\n")
    stale.chmod(0o644)
    with left_behind(8123, "zbv_one") as path:
        assert path == stale
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with left_behind(8123, "zbv_two"):
            pass
        assert tokens.find("http://127.0.0.1:8123") is None
        stale.write_text("zbv_three\n")
    assert tokens.find("http://127.0.0.1:8123") == "zbv_three"


def test_token_files_of_killed_services_are_removed(runtime: Path) -> None:
    folder = runtime / "zbv"
    with left_behind(8124, "zbv_other"):
        (folder / "token-8125").write_text("zbv_stale\n")  # without the lock of a living service
        (folder / "token-of-something-else").write_text("x")
        with left_behind(8123, "zbv_own"):
            names = {path.name for path in folder.iterdir()}
            assert names == {"token-8123", "token-8124", "token-of-something-else"}


def test_without_a_runtime_directory_the_token_is_in_the_state_directory(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    runtime.rmdir()
    with left_behind(8123, "zbv_local") as path:
        assert path is not None
        # Several machines may share a home directory.
        in_state = tmp_path / "state" / "zbv" / f"token-{platform.node()}-8123"
        assert path == in_state or "run/user" in str(path)
        assert tokens.find("http://127.0.0.1:8123") == "zbv_local"


def test_a_service_reuses_the_token_of_its_last_start(runtime: Path, tmp_path: Path) -> None:
    one = f"sqlite:///{tmp_path}/one.db"
    first = kept_token(8123, one)
    (path,) = (tmp_path / "state" / "zbv").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(kept_token(8123, one)) == str(first)
    (tmp_path / "one.db").touch()
    others = [kept_token(8124, one), kept_token(8123, f"sqlite:///{tmp_path}/two.db")]
    assert len({str(first), *map(str, others)}) == 3, "each port and database has its own token"
    kept_token(8125, "postgresql://u:secret@h/zbv")
    assert str(kept_token(8123, one)) == str(first)
    texts = [found.read_text() for found in path.parent.iterdir()]
    assert not any("secret@" in text for text in texts)
    assert not any("two.db" in text for text in texts), "that database was deleted"


def test_a_kept_token_that_others_could_know_is_replaced(runtime: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/zbv.db"
    kept_token(8123, url)
    (path,) = (tmp_path / "state" / "zbv").iterdir()

    for harm in (
        lambda: path.chmod(0o604),
        lambda: path.chmod(0o620),
        lambda: path.write_text("nonsense\n\xff"),
        lambda: path.write_text(""),
        lambda: path.symlink_to(path.rename(tmp_path / "aside")),
    ):
        first = str(kept_token(8123, url))
        harm()
        second = str(kept_token(8123, url))
        assert second != first
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert str(kept_token(8123, url)) == second
    path.unlink()
    path.mkdir()
    assert str(kept_token(8123, url)) != second, "it cannot be replaced; this one is for this start only"


def test_services_that_start_at_once_share_one_token(runtime: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: str(kept_token(8123, f"sqlite:///{tmp_path}/zbv.db")), range(32)))
    assert len(found) == 1


def test_explicit_tokens_precede_the_local_token(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runtime / "told"
    path.write_text("zbv_file\n")
    with left_behind(8123, "zbv_local"):
        monkeypatch.setenv("ZBV_TOKEN_FILE", str(path))
        assert tokens.find("http://127.0.0.1:8123") == "zbv_file"
        monkeypatch.setenv("ZBV_TOKEN", "zbv_told")
        assert tokens.find("http://127.0.0.1:8123") == "zbv_told"
    monkeypatch.delenv("ZBV_TOKEN")
    for content in (b"", b"two words", b"zbv_\xff", b"a\nb"):
        path.write_bytes(content)
        with pytest.raises(CredentialsUnusable, match=r"--token-file .*told (contains|is not)"):
            tokens.find("http://127.0.0.1:8123")
    path.unlink()
    with pytest.raises(CredentialsUnusable, match=r"--token-file .* cannot read"):
        tokens.find("http://planner")


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_a_starting_service_shows_a_link_only_on_a_terminal(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    """Others may read the file or the journal in which its output ends."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    server = commands._Server(uvicorn.Config(service.app, port=0, lifespan="off"), service.app, "http://zbv")
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    for listener in server.servers:
        listener.close()
    printed = capsys.readouterr().out
    assert "token link --server http://zbv" in printed
    assert ("/sign-in?token=" in printed) == is_terminal
