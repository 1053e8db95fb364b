"""``/layouts``: the form of a search for layouts, and the list of these searches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, get_args
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from zbv_models.estimate.config import CopiesChoice, Optimizer, Pairs, PrecisionName
from zbv_models.estimate.model import FrozenDtype
from zbv_models.estimate.sections import preset, preset_names
from zbv_models.layouts.layout import Order, Recompute
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.layer import Recomputed

from zbv_service.api.bodies import read_form
from zbv_service.api.negotiation import root_of
from zbv_service.api.state import state_of
from zbv_service.documents.problems import unpack
from zbv_service.pages.shell import page
from zbv_service.records.lists import SearchListQuery
from zbv_service.records.searches import LayoutSearchDocument
from zbv_service.security.access import READ, needs
from zbv_service.security.quotas import STORES
from zbv_service.security.tokens import grant_of

MAX_FORM_BYTES = 256 * 1024
"""Most bytes of a form, which may have a model and a cluster as JSON."""
LISTED = 20
"""Searches below the form."""

router = APIRouter(include_in_schema=False)


@router.get("/layouts", dependencies=[READ])
async def get_layouts_page(request: Request) -> HTMLResponse:
    """The form, empty or with the request of an earlier search (``from``), and the newest searches."""
    source = request.query_params.get("from", "")
    form = LayoutForm()
    if source:
        _, packed = await state_of(request).searches.asked(source, LayoutSearchDocument)
        form = await state_of(request).computations.write(_former_form, packed)
    return await _form_page(request, form)


@router.post("/layouts", dependencies=[needs("search"), STORES["searches"]])
async def post_layouts(request: Request) -> Response:
    """Start a search, and show its page; a form with mistakes comes back with what is wrong."""
    form = LayoutForm.parse(parse_qs(await read_form(request, MAX_FORM_BYTES)))
    found = state_of(request)
    try:
        record = await found.searches.submit(form.document(), grant_of(request), "layouts")
    except InvalidInput as error:
        return await _form_page(request, form.with_issues(error), 422)
    return RedirectResponse(f"{root_of(request)}/layouts/{quote(record.id)}", 303)


async def _form_page(request: Request, form: LayoutForm, status: int = 200) -> HTMLResponse:
    listed = await state_of(request).searches.page(SearchListQuery(kind="layouts", limit=LISTED))
    return await page(request, "layouts.html.j2", status, form=form, rows=listed.items)


def _former_form(packed: bytes) -> LayoutForm:
    return form_of(unpack(packed))


NUMBERS = ("global_batch", "sequence_length", "prediction_layers", "lora_rank", "top")
LISTS = ("recompute_modules", "frozen", "target_modules", "layers_to_transform")
"""Fields with words, which are apart by spaces."""
DEFAULTS: Mapping[str, str] = {
    "model": "llama-3.1-8b",
    "device": "h100",
    "nodes": "2",
    "gpus_per_node": "8",
    "global_batch": "128",
    "top": "5",
    "sensitivity": "on",
}


@dataclass(frozen=True)
class LayoutForm:
    """The form as text."""

    values: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    """By the name of the field; absent fields are empty."""
    issues: tuple[tuple[str, str], ...] = ()
    """What is wrong: the place, and a sentence."""

    states: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "frozen_dtype": get_args(FrozenDtype),
        "precision": get_args(PrecisionName),
        "optimizer": get_args(Optimizer),
        "pairs": get_args(Pairs),
        "copies": get_args(CopiesChoice),
    }
    """What training keeps, chosen from lists; these replace what the model says."""
    modules: ClassVar[tuple[str, ...]] = get_args(Recomputed)
    """What selective recomputation may repeat."""
    fixed_numbers: ClassVar[tuple[str, ...]] = (
        *("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_parallel"),
        *("microbatch_size", "zero_stage", "recompute_layers"),
    )
    fixed_choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "recompute": get_args(Recompute),
        "placement": get_args(Order),
    }
    """Parts of a layout that are numbers, and those that are chosen from a list."""
    efforts: ClassVar[tuple[tuple[str, str], ...]] = (
        ("", "constructed orders: seconds"),
        ("quick", "quick: a second more per promising layout"),
        ("standard", "standard: up to minutes"),
    )
    executors: ClassVar[tuple[tuple[str, str], ...]] = (
        ("zbv", "zbv: any order"),
        ("megatron", "Megatron-LM"),
        ("torchtitan", "torchtitan"),
        ("torch", "PyTorch"),
        ("any", "all of these"),
    )
    """Efforts, and programs that run the pipeline, with a few words."""

    @classmethod
    def parse(cls, fields: Mapping[str, Sequence[str]]) -> LayoutForm:
        """The form that a browser sent."""
        return cls(
            {name: " ".join(given) if name in LISTS else given[-1].strip() for name, given in fields.items()}
        )

    def value(self, name: str) -> str:
        """The value of a field."""
        return self.values.get(name, "")

    @property
    def has_fixed(self) -> bool:
        """Whether a part of the layout is given."""
        return any(
            self.value(name) for name in (*self.fixed_numbers, *self.fixed_choices, "recompute_modules")
        )

    @property
    def models(self) -> tuple[tuple[str, str], ...]:
        """Names of models, with a few words."""
        return _presets()[0]

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Names of devices, with a few words."""
        return _presets()[1]

    def document(self) -> dict[str, Any]:
        """The request; raises :class:`InvalidInput` when a field has no number or no JSON."""
        issues: list[Issue] = []
        executor = self.value("executor") or "zbv"
        found: dict[str, Any] = {
            "name": self.value("name") or None,
            "model": self._model(issues),
            "cluster": self._cluster(issues),
            "fixed": self._numbers(self.fixed_numbers, issues, "/fixed")
            | {name: self.value(name) for name in self.fixed_choices if self.value(name)},
            "executor": executor,
            **{name: self.value(name) for name in self.states if self.value(name)},
            **{name: self.value(name).split() or None for name in LISTS},
            "profiles": self._profiles(issues),
            "points": executor == "zbv",
            "sensitivity": executor == "zbv" and bool(self.value("sensitivity")),
            "options": {"effort": self.value("effort") or None, **self._time_limit(issues)},
            **self._numbers(NUMBERS, issues, ""),
        }
        if issues:
            raise InvalidInput(issues)
        return found

    def with_issues(self, error: InvalidInput) -> LayoutForm:
        """The form with what is wrong."""
        issues = tuple((place_of(each.pointer), each.detail) for each in error.issues)
        return replace(self, issues=issues)

    def _model(self, issues: list[Issue]) -> Any:
        if self.value("model_json"):
            return self._json("model_json", "/model", issues)
        return {"presets": [self.value("model")]}

    def _cluster(self, issues: list[Issue]) -> Any:
        if self.value("cluster_json"):
            return self._json("cluster_json", "/cluster", issues)
        sizes = self._numbers(("nodes", "gpus_per_node"), issues, "/cluster")
        return {"device": self.value("device"), **sizes}

    def _profiles(self, issues: list[Issue]) -> list[Any]:
        """One profile, or a list of several."""
        found = self._json("profiles_json", "/profiles", issues) if self.value("profiles_json") else []
        return found if isinstance(found, list) else [found]

    def _time_limit(self, issues: list[Issue]) -> dict[str, float]:
        text = self.value("time_limit")
        if not text:
            return {}
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not math.isfinite(seconds):
            issues.append(Issue("/options/time_limit", f"found {text[:40]!r}; must be a number of seconds."))
            return {}
        return {"time_limit": seconds}

    def _json(self, name: str, pointer: str, issues: list[Issue]) -> Any:
        """The document in a field; an empty list if it is none."""
        try:
            return json.loads(self.value(name))
        except (ValueError, RecursionError) as error:
            issues.append(Issue(pointer, f"not JSON: {error}. Paste a whole document."))
            return []

    def _numbers(self, names: Sequence[str], issues: list[Issue], pointer: str) -> dict[str, int]:
        found = {}
        for name in names:
            text = self.value(name)
            if text.isascii() and text.isdecimal() and len(text) < 10:
                found[name] = int(text)
            elif text:
                issues.append(Issue(f"{pointer}/{name}", f"found {text[:40]!r}; must be a whole number."))
        return found


def form_of(request: Mapping[str, Any]) -> LayoutForm:
    """The form of a normalised request."""
    model, cluster = dict(request["model"]), dict(request["cluster"])
    values: dict[str, Any] = {name: request.get(name) for name in NUMBERS}
    values |= request["fixed"] | {name: request.get(name) for name in LayoutForm.states}
    values |= {name: " ".join(request.get(name) or ()) or None for name in LISTS}
    values["profiles_json"] = json.dumps(request["profiles"], indent=2) if request.get("profiles") else None
    limit = request["options"].get("time_limit")
    values["time_limit"] = None if limit is None else f"{limit:.15g}"
    names = model.get("presets")
    if isinstance(names, list) and len(names) == 1 and names[0] in dict(_presets()[0]) and len(model) == 1:
        values["model"] = names[0]
    else:
        values["model_json"] = json.dumps(model, indent=2)
    if set(cluster) <= {"device", "nodes", "gpus_per_node"} and cluster.get("device") in dict(_presets()[1]):
        values |= cluster
    else:
        values["cluster_json"] = json.dumps(cluster, indent=2)
    values["effort"], values["executor"] = request["options"].get("effort"), request.get("executor")
    values["sensitivity"] = "on" if request.get("sensitivity") else None
    return LayoutForm({name: str(value) for name, value in values.items() if value is not None})


def place_of(pointer: str) -> str:
    """A pointer into the request in words."""
    parts = [part.replace("_", " ") for part in pointer.split("/") if part]
    return ", ".join(parts).capitalize() or "Request"


@cache
def _presets() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Models and devices."""
    found = [(name, preset(name)) for name in preset_names()]
    models = tuple((name, each.about) for name, each in found if each.model)
    devices = tuple((name, each.about) for name, each in found if each.device and not each.model)
    return models, devices
