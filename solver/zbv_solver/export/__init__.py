"""Plans for other programs and for people: one file per format, all of them listed in :data:`FORMATS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from zbv_solver.errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    from zbv_solver.plans.plan import Plan

_CSV, _JSON, _HTML = "text/csv; charset=utf-8", "application/json", "text/html; charset=utf-8"


@dataclass(frozen=True)
class Format:
    """An export format. The module of the same name has its ``render``."""

    name: str
    media_type: str
    """The content type of an HTTP answer."""
    suffix: str
    """The end of a file's name, with the dot."""
    description: str
    """One line for people."""

    def render(self, plan: Plan) -> str:
        """The plan as text; deterministic."""
        # Importing the modules takes up to a second, so it is left until a format is used.
        module = import_module(f"{__name__}.{self.name.replace('-', '_')}")
        text: str = module.render(plan)
        return text


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        each.name: each
        for each in (
            Format("torch-csv", _CSV, ".csv", "compute-only CSV for torch.distributed.pipelining"),
            Format(
                "torch-comms-csv",
                _CSV,
                ".comms.csv",
                "CSV with sends and receives for torch.distributed.pipelining",
            ),
            Format(
                "torchtitan",
                "text/x-python; charset=utf-8",
                ".torchtitan.py",
                "settings for torchtitan 0.3.0 and newer, with the schedule CSV inside",
            ),
            Format(
                "chrome-trace",
                _JSON,
                ".trace.json",
                "Trace Event Format, opens in Perfetto and chrome://tracing",
            ),
            Format("svg", "image/svg+xml", ".svg", "static picture of the Gantt chart"),
            Format("html", _HTML, ".html", "interactive page in one file, opens from disk"),
        )
    }
)
"""Every format by name."""


RENUMBERED: frozenset[str] = frozenset({"torch-csv", "torch-comms-csv", "torchtitan"})
"""The formats that number microbatches as they run: see :func:`zbv_solver.export.torch_csv.batch_order`."""


def export(plan: Plan, name: str) -> str:
    """A plan in the named format.

    Raises
    ------
    InvalidInput
        When there is no such format, or the plan is too large for it.
    InvalidPlan
        When the plan's orders cannot be executed.
    """
    if plan.orders.copies is not None and name in RENUMBERED:
        raise InvalidInput.at(
            "/format",
            f"found {name!r} for a plan with copies to the host, which PyTorch's schedules do not have; plan "
            f"without costs.offload, or costs.host_link of layers.",
        )
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        raise InvalidInput.at("/format", f"found {name!r}; must be one of {', '.join(FORMATS)}.{hint}")
    return FORMATS[name].render(plan)
