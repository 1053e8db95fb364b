"""The calls of the API, except those of agents (:mod:`zbv_service.client.agent`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zbv_solver.plans.plan import Plan

from zbv_service.client.answers import (
    Check,
    Estimate,
    Event,
    RankPlan,
    Run,
    Search,
    SearchPage,
    as_type,
    read_plan,
    read_rank,
    read_run,
)
from zbv_service.client.calls import as_json, as_nothing, as_text, below
from zbv_service.client.connection import Connection
from zbv_service.client.errors import ClientError, RunTimeout, SearchEnded, SearchTimeout

POLL_SECONDS = (0.05, 1.0)
"""First and longest pause between two polls, where the service's events cannot be read."""
SILENCE_SECONDS = 45.0
"""A stream that is silent for longer is dead: the service sends a comment more often than that."""


class Watch:
    """A search as the waiting caller knows it.

    Parameters
    ----------
    on_progress
        Called with the first state, and with every state that differs from the one before.
    timeout
        Seconds after which the caller gives up; None waits without limit.
    """

    def __init__(self, search: Search, on_progress: Callable[[Search], None] | None, timeout: float | None):
        self.search = search
        self._on_progress = on_progress
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._pause, self._longest = POLL_SECONDS
        if on_progress is not None:
            on_progress(search)

    def update(self, search: Search) -> None:
        """Take over the search as the service describes it now."""
        if search != self.search and self._on_progress is not None:
            self._on_progress(search)
        self.search = search

    def apply(self, event: Event) -> None:
        """Apply an event. Events of an earlier attempt at the search are ignored."""
        if event.data.get("attempts", self.search.attempts) >= self.search.attempts:
            self.update(self.search.after(event))

    def patience(self) -> float:
        """Seconds to wait for the next byte; raises :class:`SearchTimeout` after the deadline."""
        if self._deadline is None or self._timeout is None:
            return SILENCE_SECONDS
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SearchTimeout(self.search, self._timeout)
        return min(left, SILENCE_SECONDS)

    def pause(self) -> float:
        """Seconds until the next poll; raises :class:`SearchTimeout` after the deadline."""
        pause = min(self._pause, self.patience())
        self._pause = min(self._longest, 1.5 * self._pause)
        return pause

    def result(self) -> Search:
        """The ended search; raises :class:`SearchEnded` when it has no plan or layout."""
        if self.search.plan_id is None:
            raise SearchEnded(self.search)
        return self.search


_RUN_POLL_SECONDS = 0.2


class Client(Connection):
    """A client of the service. Its parameters are those of :class:`Connection`."""

    def submit(
        self, problem: Any, options: Mapping[str, Any] | None = None, *, name: str | None = None
    ) -> Search:
        """Start a search for a problem document; an identical submission returns the same search.

        Parameters
        ----------
        name
            Shown in lists and pages; replaces an earlier name of the same search.

        Raises
        ------
        InvalidRequest
            When the problem or an option breaks a rule.
        """
        body = {"problem": problem, "options": dict(options or {})}
        body |= {"name": name} if name is not None else {}
        return self._post(as_type(Search), "searches", json=body)

    def search(self, search_id: str) -> Search:
        """The state of a search of either kind."""
        return self._get(as_type(Search), "searches", search_id)

    def searches(self, limit: int = 100, **filters: Any) -> list[Search]:
        """Searches, newest first; ``filters`` are those of the API, such as ``state``."""
        return list((self._search_page("/v1/searches", limit=limit, **filters)).searches)

    def all_searches(self, page: int = 100, **filters: Any) -> Iterator[Search]:
        """All searches, newest first, fetched ``page`` at a time."""
        found = self._search_page("/v1/searches", limit=page, **filters)
        while True:
            yield from found.searches
            if found.next is None:
                return
            found = self._search_page(found.next)

    def _search_page(self, path: str, **params: Any) -> SearchPage:
        return self._call("GET", path, as_type(SearchPage), params=params)

    def cancel(self, search_id: str) -> Search:
        """Stop a search; it keeps the best plan found, or the layouts planned so far."""
        return self._post(as_type(Search), "searches", search_id, "cancel")

    def delete(self, search_id: str) -> None:
        """Delete a search."""
        self._call("DELETE", below("searches", search_id), as_nothing)

    def events(self, search_id: str, last_event_id: str | None = None) -> Iterator[Event]:
        """The events of a search until its end, starting after ``last_event_id``.

        When the connection breaks, the client reconnects and continues with the next event.

        Raises
        ------
        ServiceUnreachable
            When it cannot reconnect.
        """
        stream = self._stream(below("searches", search_id, "events"), last_event_id)
        yield from self._events(stream, lambda: SILENCE_SECONDS)

    def wait(
        self,
        search_id: str,
        on_progress: Callable[[Search], None] | None = None,
        timeout: float | None = None,
    ) -> Search:
        """Wait until a search ends with a plan or layouts. Calls ``on_progress`` with every new state.

        The client follows the search's events, or polls where it cannot read them.

        Raises
        ------
        SearchEnded
            When the search ends without either.
        SearchTimeout
            When it has not ended after ``timeout`` seconds.
        """
        watch = Watch(self.search(search_id), on_progress, timeout)
        stream, has_events = self._stream(below("searches", search_id, "events")), True
        while not watch.search.is_finished:
            if has_events:
                try:
                    for event in self._events(stream, watch.patience):
                        watch.apply(event)
                except SearchTimeout:
                    raise
                except ClientError:
                    has_events = False  # perhaps a proxy does not let streams pass
            else:
                time.sleep(watch.pause())
            # Events carry only what changed; the search itself has every field.
            watch.update(self.search(search_id))
        return watch.result()

    def submit_layouts(self, request: Mapping[str, Any]) -> Search:
        """Start a search for the best layouts of a model on a cluster; equal requests return the same search.

        Parameters
        ----------
        request
            ``model``, ``cluster``, and optionally ``global_batch``, ``sequence_length``, ``fixed``, ``top``,
            ``options`` and ``name``.

        Raises
        ------
        InvalidRequest
            When the request breaks a rule.
        """
        body = dict(request)
        return self._post(as_type(Search), "layouts", json=body)

    def check(
        self,
        problem: Any,
        options: Mapping[str, Any] | None = None,
        *,
        limit_fraction: float | None = None,
        plan: Any = None,
    ) -> Check:
        """Check a problem document without searching. A broken rule is part of the result, not an error.

        Parameters
        ----------
        limit_fraction
            Replaces ``memory.limit`` by this fraction of the activation memory of 1F1B on the same model.
        plan
            A plan document for the problem; its claims are checked as well.
        """
        body = {"problem": problem, "options": dict(options or {})}
        if limit_fraction is not None:
            body["limit_fraction"] = limit_fraction
        if plan is not None:
            body["plan"] = plan
        return self._post(as_type(Check), "problems", "check", json=body)

    def estimate(self, problem: Any) -> Estimate:
        """Search a problem document for a fraction of a second; the service stores nothing.

        Raises
        ------
        InvalidRequest
            When the problem breaks a rule, or no plan fits its memory limit.
        """
        body = {"problem": problem}
        return self._post(as_type(Estimate), "problems", "estimate", json=body)

    def compare(self, problem: Any) -> dict[str, Any]:
        """Evaluate every classical schedule for a problem document; the service stores nothing."""
        return self._post(as_type(dict[str, Any]), "problems", "compare", json={"problem": problem})

    def pack(self, batch: Any) -> dict[str, Any]:
        """Pack a batch into microbatches for its replicas; the service stores nothing.

        The answer has each replica's problem, to be submitted for a plan.

        Raises
        ------
        InvalidRequest
            When the batch breaks a rule or is too large, or its longest sequence does not fit.
        """
        return self._post(as_type(dict[str, Any]), "problems", "pack", json={"batch": batch})

    def plan_document(self, plan_id: str) -> dict[str, Any]:
        """A plan as its JSON document."""
        return self._get(as_type(dict[str, Any]), "plans", plan_id)

    def simulation(
        self, plan_id: str, jitter: str | None = None, *, scenarios: int | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """A plan and the classical schedules when durations vary; ``jitter`` such as ``"5%"``."""
        query = {"jitter": jitter, "scenarios": scenarios, "seed": seed}
        return self._get(as_type(dict[str, Any]), "plans", plan_id, "simulation", **query)

    def plan(self, plan_id: str) -> Plan:
        """A plan; raises :class:`InvalidAnswer` when it does not hash to its id."""
        return read_plan(plan_id, self.plan_document(plan_id))

    def rank(self, plan_id: str, rank: int) -> RankPlan:
        """One rank's part of a plan."""
        return self._get(as_json(read_rank), "plans", plan_id, "ranks", str(rank))

    def import_plan(self, document: Mapping[str, Any]) -> str:
        """Store a plan and return its id.

        Raises
        ------
        InvalidRequest
            When the plan is invalid.
        """
        return self._post(as_type(str, "plan_id"), "plans", json=dict(document))

    def export(self, plan_id: str, format_name: str) -> str:
        """A plan in another format, as ``zbv export`` writes it."""
        return self._get(as_text, "plans", plan_id, "export", format_name)

    def sign_in_link(self) -> str:
        """A link that signs one browser in, once, with this client's permissions."""
        return self._post(as_type(str, "url"), "sign-in-links")

    def submit_run(
        self,
        plan_id: str | None,
        model: Mapping[str, Any] | None = None,
        *,
        nodes: int,
        steps: int | None = None,
        script: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        problem: Any = None,
        search_options: Mapping[str, Any] | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Run:
        """Start a training run.

        Parameters
        ----------
        plan_id, problem
            Exactly one of them: a stored plan, or a problem document to be planned first.
        model
            ``factory``, and optionally ``arguments`` and ``seed``; needs ``steps``.
        script
            In place of a model: ``path``, absolute, and optionally ``arguments``, a list of texts.
        key
            The Idempotency-Key: requests with the same key start one run. Random by default.
        name
            Shown in lists and pages.

        Raises
        ------
        InvalidRequest
            When the plan does not exist, or something breaks a rule.
        """
        body = {
            "plan_id": plan_id,
            "search_options": None if search_options is None else dict(search_options),
            "nodes": nodes,
            "options": dict(options or {}),
        }
        body |= {"model": dict(model)} if model is not None else {}
        body |= {"script": dict(script)} if script is not None else {}
        body |= {"steps": steps} if steps is not None else {}
        body |= {"name": name} if name is not None else {}
        if problem is not None:
            body["problem"] = problem
        return self._post(as_json(read_run), "runs", json=body, key=key or uuid.uuid4().hex)

    def run(self, run_id: str) -> Run:
        """The state of a run."""
        return self._get(as_json(read_run), "runs", run_id)

    def runs(self, limit: int = 100, **filters: Any) -> list[Run]:
        """Runs, newest first; ``filters`` are those of the API, such as ``state``."""
        found = self._get(as_type(list[dict[str, Any]], "runs"), "runs", limit=limit, **filters)
        return [read_run(each) for each in found]

    def follow_run(self, run_id: str, last_event_id: str | None = None) -> Iterator[Event]:
        """The events of a run until its end, as :meth:`events` of a search; the last event is ``end``.

        Raises
        ------
        ServiceUnreachable
            When it cannot reconnect.
        """
        stream = self._stream(below("runs", run_id, "events"), last_event_id)
        yield from self._events(stream, lambda: SILENCE_SECONDS)

    def run_events(self, run_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The events of a run so far, starting after the event with the id ``after``."""
        read = as_type(list[dict[str, Any]], "events")
        return self._get(read, "runs", run_id, "events", after=after)

    def cancel_run(self, run_id: str) -> Run:
        """Stop a run on all of its nodes."""
        return self._post(as_json(read_run), "runs", run_id, "cancel")

    def change_plan(self, run_id: str, plan_id: str) -> Run:
        """Switch a run to another plan of the same shape; raises :class:`InvalidRequest`."""
        return self._post(as_json(read_run), "runs", run_id, "plan", json={"plan_id": plan_id})

    def run_trace(self, run_id: str, generation: int | None = None) -> dict[str, Any]:
        """The newest step that all ranks measured, in the Trace Event Format; raises :class:`NotFound`."""
        return self._get(as_type(dict[str, Any]), "runs", run_id, "trace", generation=generation)

    def run_steps(self, run_id: str) -> list[dict[str, Any]]:
        """The steps of a run, ascending: ``step``, ``seconds`` and ``loss``; some 500 of a long run."""
        return self._get(as_type(list[dict[str, Any]], "steps"), "runs", run_id, "steps")

    def rank_log(self, run_id: str, rank: int, generation: int | None = None) -> str:
        """The end of a rank's log; raises :class:`NotFound`."""
        return self._get(as_text, "runs", run_id, "ranks", str(rank), "log", generation=generation)

    def wait_run(self, run_id: str, timeout: float) -> Run:
        """Wait until a run ends; raises :class:`RunTimeout` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not (found := self.run(run_id)).is_finished:
            if time.monotonic() > deadline:
                raise RunTimeout(found, timeout)
            time.sleep(_RUN_POLL_SECONDS)
        return found

    def agents(self) -> list[dict[str, Any]]:
        """The agents that are present."""
        return self._get(as_type(list[dict[str, Any]], "agents"), "agents")
