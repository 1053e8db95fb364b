"""The Prometheus metrics of an application. Their names must stay stable; docs/metrics.md lists them."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from zbv_solver import __version__

_SEARCH_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
_REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_GAPS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Tally:
    """Counts of the database's rows by state, made for each request of metrics."""

    searches: dict[str, int]
    agents: dict[str, int]
    runs: dict[str, int]
    queue_age: float
    """Seconds since the oldest queued search was accepted; 0 if no search is queued."""


class Metrics:
    """Counters, gauges and histograms, in a separate registry for each application."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        build = Gauge(
            "zbv_build_info", "Always 1; the labels say what runs.", ["version", "python"], registry=registry
        )
        build.labels(__version__, platform.python_version()).set(1)
        self.searches = Gauge("zbv_searches", "Searches in the database.", ["state"], registry=registry)
        self.queue_age = Gauge(
            "zbv_search_queue_age_seconds", "Age of the oldest queued search.", registry=registry
        )
        self.agents = Gauge("zbv_agents", "Agents in the database.", ["state"], registry=registry)
        self.runs = Gauge("zbv_runs", "Runs in the database.", ["state"], registry=registry)
        self.search_seconds = Histogram(
            "zbv_search_duration_seconds",
            "Time from its start here to its end, of searches that ended.",
            ["state", "method"],
            buckets=_SEARCH_SECONDS,
            registry=registry,
        )
        self.search_gap = Histogram(
            "zbv_search_gap_ratio",
            "objective / lower_bound - 1 of plans that searches found.",
            buckets=_GAPS,
            registry=registry,
        )
        self.contradicted_bounds = Counter(
            "zbv_contradicted_bounds", "Verified plans that undercut a lower bound: bugs.", registry=registry
        )
        self.refused_incumbents = Counter(
            "zbv_refused_incumbents",
            "Stored plans that did not fit the search that was to start from them.",
            registry=registry,
        )
        self.plan_fetches = Counter("zbv_plan_fetches", "Plans asked for, 304s included.", registry=registry)
        self.rank_fetches = Counter(
            "zbv_rank_fetches", "Parts of plans asked for, 304s included.", registry=registry
        )
        self.requests = Counter(
            "zbv_http_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "zbv_http_request_duration_seconds",
            "Time until the last byte of an answer was handed over; of a stream, until the first.",
            ["method", "route"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.event_streams = Gauge("zbv_event_streams", "Event streams that are open.", registry=registry)

    def take(self, tally: Tally) -> None:
        """Set the gauges to these counts."""
        for gauge, counts in (
            (self.searches, tally.searches),
            (self.agents, tally.agents),
            (self.runs, tally.runs),
        ):
            for state, count in counts.items():
                gauge.labels(state).set(count)
        self.queue_age.set(tally.queue_age)
