"""Plans for other programs and for people: one file per format, all of them listed in :data:`FORMATS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes
    ----------
    media_type
        As an HTTP answer carries it.
    suffix
        Of a file's name, with the dot.
    description
        One line for people.
    render
        The plan as text; deterministic.
    """

    name: str
    media_type: str
    suffix: str
    description: str
    render: Callable[[Plan], str]


def export(plan: Plan, name: str) -> str:
    """A plan in the named format.

    Raises
    ------
    InvalidInput
        When there is no such format, or the plan is too large for it.
    InvalidPlan
        When the plan's orders cannot be executed.
    """
    if name not in FORMATS:
        raise InvalidInput.at("/format", f"found {name!r}; must be one of {', '.join(FORMATS)}.")
    return FORMATS[name].render(plan)


def _render_of(module: str) -> Callable[[Plan], str]:
    """The ``render`` of a module of this package, imported when it is first used: some take a second."""

    def render(plan: Plan) -> str:
        text: str = import_module(f"{__name__}.{module}").render(plan)
        return text

    return render


_ALL = (
    Format(
        "torch-csv",
        "text/csv; charset=utf-8",
        ".csv",
        "compute-only CSV for torch.distributed.pipelining",
        _render_of("torch_csv"),
    ),
    Format(
        "torch-comms-csv",
        "text/csv; charset=utf-8",
        ".comms.csv",
        "CSV with sends and receives for torch.distributed.pipelining",
        _render_of("torch_comms_csv"),
    ),
    Format(
        "torchtitan",
        "application/toml",
        ".torchtitan.toml",
        "settings for torchtitan, with the schedule CSV inside",
        _render_of("torchtitan"),
    ),
    Format(
        "megatron-json",
        "application/json",
        ".nodes.json",
        "node list of Megatron-LM's zero-bubble fork",
        _render_of("megatron_json"),
    ),
    Format(
        "chrome-trace",
        "application/json",
        ".trace.json",
        "Trace Event Format, opens in Perfetto and chrome://tracing",
        _render_of("chrome_trace"),
    ),
    Format("svg", "image/svg+xml", ".svg", "static picture of the Gantt chart", _render_of("svg")),
    Format(
        "html",
        "text/html; charset=utf-8",
        ".html",
        "interactive page in one file, opens from disk",
        _render_of("html"),
    ),
)

FORMATS: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in _ALL})
"""Every format by name."""
