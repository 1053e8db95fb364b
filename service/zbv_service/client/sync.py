"""The client that blocks: carries the calls of :mod:`zbv_service.client.calls`, and waits."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from zbv_solver.plans.plan import Plan

from zbv_service import client_tls
from zbv_service.client import calls
from zbv_service.client.answers import Check, Estimate, RankPlan, Search, SearchEvent, read_plan
from zbv_service.client.calls import HEADERS, Call
from zbv_service.client.credentials import Bearer
from zbv_service.client.errors import ClientError, SearchTimeout
from zbv_service.client.events import END, EventReader
from zbv_service.client.known import KnownAnswers
from zbv_service.client.retries import DEFAULT_RETRIES, DEFAULT_TIMEOUT, Attempts, Retries
from zbv_service.client.streams import Stream
from zbv_service.client.watch import SILENCE_SECONDS, Watch

T = TypeVar("T")


class Client:
    """A connection to a service.

    Parameters
    ----------
    base_url
        Such as ``http://127.0.0.1:8000``.
    token
        Sent as the bearer token of every request. None looks for one, as
        :func:`zbv_service.client_token.find` does, and an empty one sends none.
    timeout
        Seconds for one request.
    retries
        How often a request is repeated that got no answer, or was told to come back; or all about it. Every
        one can be: those that make something carry a key or an id.
    verify
        How the service's certificate is checked, as httpx takes it; a context can hold the client's own.
        True looks in the environment, as :func:`zbv_service.client_tls.find` does.
    transport
        For tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int | Retries = DEFAULT_RETRIES,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
    ):
        self._retries = retries if isinstance(retries, Retries) else Retries(retries)
        self._timeout = timeout
        self._known = KnownAnswers()
        self._http = httpx.Client(
            base_url=base_url,
            timeout=timeout,
            auth=Bearer(token, base_url),
            headers=HEADERS,
            verify=client_tls.find() if verify is True else verify,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """Address of the service, without a trailing slash."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(
        self, problem: Any, options: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> Search:
        """Have a plan searched for a problem document; the same one twice gives the same search.

        Parameters
        ----------
        key
            The request's Idempotency-Key: a repetition with the same key is the same request. New by default.

        Raises
        ------
        InvalidRequest
            When the problem or an option breaks a rule.
        """
        return self._call(calls.submit(problem, options, key))

    def search(self, search_id: str) -> Search:
        """The state of a search."""
        return self._call(calls.search(search_id))

    def searches(self, limit: int = 100, **filters: Any) -> list[Search]:
        """The newest searches first; ``filters`` are the API's, such as ``state``."""
        return list((self._call(calls.searches(limit=limit, **filters))).searches)

    def all_searches(self, page: int = 100, **filters: Any) -> Iterator[Search]:
        """Every search, the newest first, fetched ``page`` at a time."""
        found = self._call(calls.searches(limit=page, **filters))
        while True:
            yield from found.searches
            if found.next is None:
                return
            found = self._call(calls.next_searches(found.next))

    def cancel(self, search_id: str) -> Search:
        """Stop a search; it keeps the best plan it found."""
        return self._call(calls.cancel(search_id))

    def delete(self, search_id: str) -> None:
        """Discard a search."""
        self._call(calls.delete(search_id))

    def events(self, search_id: str, last_event_id: str | None = None) -> Iterator[SearchEvent]:
        """What happens to a search until its end, from the event after ``last_event_id``.

        A connection that breaks is made again, and goes on where it broke.

        Raises
        ------
        ServiceUnreachable
            When it breaks, and cannot be made again.
        """
        yield from self._events(search_id, EventReader(last_event_id), lambda: SILENCE_SECONDS)

    def wait(
        self,
        search_id: str,
        on_progress: Callable[[Search], None] | None = None,
        timeout: float | None = None,
    ) -> Search:
        """Wait for a search to end with a plan. ``on_progress`` is called with every state seen.

        Its events are followed; where they cannot be had, it is looked at again and again.

        Raises
        ------
        SearchEnded
            When it ends without a plan.
        SearchTimeout
            When it has not ended after ``timeout`` seconds.
        """
        watch = Watch(self.search(search_id), on_progress, timeout)
        reader, has_events = EventReader(), True
        while not watch.search.is_finished:
            if has_events:
                try:
                    for event in self._events(search_id, reader, watch.patience):
                        watch.heard(event)
                except SearchTimeout:
                    raise
                except ClientError:
                    has_events = False  # it may be the stream that something between us does not let pass
            else:
                time.sleep(watch.pause())
            # What the service says last has every field; and whoever waits for a plan wants it stored.
            watch.saw(self.search(search_id))
        return watch.result()

    def check(
        self,
        problem: Any,
        options: Mapping[str, Any] | None = None,
        *,
        limit_fraction: float | None = None,
        plan: Any = None,
    ) -> Check:
        """Whether a search of a problem document would be accepted, and what its numbers mean.

        A problem that breaks a rule is no error here: the answer says so.

        Parameters
        ----------
        limit_fraction
            In place of ``memory.limit``: a fraction of what 1F1B's activations take on the same model.
        plan
            A plan document that is to answer the problem: its claims are checked, too.
        """
        return self._call(calls.check(problem, options, limit_fraction, plan))

    def estimate(self, problem: Any) -> Estimate:
        """What a moment's search reaches on a problem document; nothing is stored.

        Raises
        ------
        InvalidRequest
            When the problem breaks a rule, or no plan fits its memory limit.
        """
        return self._call(calls.estimate(problem))

    def compare(self, problem: Any) -> dict[str, Any]:
        """Every classical schedule for a problem document; nothing is searched or stored."""
        return self._call(calls.compare(problem))

    def plan_document(self, plan_id: str) -> dict[str, Any]:
        """A plan as its JSON document."""
        return self._call(calls.plan(plan_id))

    def plan(self, plan_id: str) -> Plan:
        """A plan; that it hashes to its id is checked here.

        Raises
        ------
        InvalidAnswer
            When it does not.
        """
        return read_plan(plan_id, self.plan_document(plan_id))

    def rank(self, plan_id: str, rank: int) -> RankPlan:
        """One rank's part of a plan; asked for again, it is not sent again."""
        return self._call(calls.rank(plan_id, rank))

    def import_plan(self, document: Mapping[str, Any]) -> str:
        """Store a plan made elsewhere and return its id.

        Raises
        ------
        InvalidRequest
            When the service finds it wrong.
        """
        return self._call(calls.import_plan(document))

    def sign_in_link(self) -> str:
        """A link that signs one browser in, once; it may do there what this client may."""
        return self._call(calls.sign_in_link())

    def export(self, plan_id: str, format_name: str) -> str:
        """A plan in another format, as ``zbv export`` writes it."""
        return self._call(calls.export(plan_id, format_name))

    def _call(self, call: Call[T]) -> T:
        response = calls.checked(self._send(call), call.errors)
        result: T = self._known.read(call, response)
        return result

    def _send(self, call: Call[Any]) -> httpx.Response:
        attempts = Attempts(self._retries, self.base_url)
        while True:
            try:
                request = self._http.build_request(**call.request)
                request.headers.update(self._known.headers(call))
                response = self._http.send(request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause = attempts.after_error(error)
            else:
                told = attempts.after_answer(response)
                if told is None:
                    return response
                pause = told
            time.sleep(pause)

    def _events(
        self, search_id: str, reader: EventReader, patience: Callable[[], float]
    ) -> Iterator[SearchEvent]:
        stream = Stream(search_id, reader, self._retries, self.base_url)
        while True:
            broken: httpx.HTTPError | None = None
            try:
                timeout = httpx.Timeout(self._timeout, read=patience())
                with self._http.stream(**stream.open().request, timeout=timeout) as response:
                    if not response.is_success:
                        response.read()
                    if not stream.accept(response):
                        return
                    for chunk in response.iter_bytes():
                        for event in stream.feed(chunk):
                            yield event
                            if event.kind == END:
                                return
            except httpx.HTTPError as error:
                broken = error
            patience()
            time.sleep(stream.broke(broken))
