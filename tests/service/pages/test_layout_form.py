"""Flags of both commands, the request and the form of the page have the same values of a search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import zbv_service.commands.cli as service
import zbv_solver.commands.cli as solver
from pydantic import BaseModel
from support.measured_profiles import MEASURED_MODEL, as_estimated
from zbv_service.documents.layouts import LayoutRequest, new_layout_search, read_layouts
from zbv_service.pages.layouts import LayoutForm, form_of
from zbv_service.pages.shell import Shell, render
from zbv_service.settings import Settings
from zbv_solver.errors import InvalidInput

OF_ZBV = {"cut", "help", "output", "workers"}
"""Where the command writes, and how many threads of this machine search: no part of a search."""
OF_CLIENT = {"help", "output", "server", "token_file", "tls_ca", "tls_cert", "tls_key", "detach", "quiet"}
"""The same of the client, and how it reaches the service that searches."""
IN_DOCUMENTS = {"preset": "model", "profile": "profiles", "adapter": "lora_rank"}
"""Names of presets are a part of the model, each profile is one of a list, an adapter stands for flags."""
IN_FORM = {
    **{"model_json": "model", "cluster_json": "cluster", "profiles_json": "profiles"},
    **{"device": "cluster", "nodes": "cluster", "gpus_per_node": "cluster"},
}
"""Fields for a part of a document, and fields with a document as JSON."""
ALWAYS_IN_FORM = {"points"}
"""The page of a search shows a picture of all layouts."""
Capture = pytest.CaptureFixture[str]


def flags(main: Callable[[list[str]], int], capsys: Capture) -> set[str]:
    """The names of the flags that the help of the command ``layout`` lists, and its file."""
    with pytest.raises(SystemExit):
        main(["layout", "--help"])
    found = re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?--([a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    return {"model", *(name.replace("-", "_") for name in found)}


def keys(document: type[BaseModel]) -> set[str]:
    """The keys of a document, with those of its objects in place of these."""
    found: set[str] = set()
    for name, field in document.model_fields.items():
        inner = field.annotation
        is_object = isinstance(inner, type) and issubclass(inner, BaseModel)
        found |= keys(inner) if is_object else {name}  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("main", "others"), [(solver.main, OF_ZBV), (service.main, OF_CLIENT)])
def test_a_command_has_a_flag_for_every_value_of_the_request(
    main: Callable[[list[str]], int], others: set[str], capsys: Capture
) -> None:
    found = flags(main, capsys)
    assert others < found
    for_service = {"name"} if main is solver.main else set()  # nobody lists the searches of zbv
    assert {IN_DOCUMENTS.get(name, name) for name in found - others} == keys(LayoutRequest) - for_service


def test_the_form_has_a_field_for_every_value_of_the_request() -> None:
    shell = Shell(may=frozenset({"search"}))
    html = render("layouts.html.j2", shell, form=LayoutForm(), rows=[]).decode()
    form = html[html.index('class="layout-form"') : html.index("</form>", html.index('class="layout-form"'))]
    fields = set(re.findall(r'<(?:input|select|textarea)[^>]* name="([a-z_]+)"', form))
    assert {IN_FORM.get(name, name) for name in fields} | ALWAYS_IN_FORM == keys(LayoutRequest)
    labels = re.findall(r'<label for="[a-z_]+">([^<]*)', form)
    assert len(labels) > len(fields) // 2
    assert not [label for label in labels if "_" in label], "labels are words, not keys"


FIELDS: dict[str, list[str]] = {
    "model_json": [json.dumps({"model": MEASURED_MODEL})],
    **{"device": ["h100"], "nodes": ["1"], "gpus_per_node": ["2"], "global_batch": ["8"]},
    **{"sequence_length": ["256"], "prediction_layers": ["1"], "precision": ["mixed"]},
    **{"optimizer": ["lion"], "recompute_modules": ["core_attn", "mlp"], "top": ["3"]},
    **{"executor": ["megatron"], "effort": ["quick"], "time_limit": ["2.5"]},
    **{"frozen": ["embedding 0-1"], "lora_rank": ["8"], "target_modules": ["q_proj v_proj"]},
    "layers_to_transform": ["0"],
    **{"recompute": ["selective"], "pipeline_parallel": ["2"], "profiles_json": [""]},
}


def test_what_a_form_says_is_in_its_request_and_comes_back() -> None:
    document = LayoutForm.parse(FIELDS).document()
    asked = LayoutRequest.model_validate(document)
    assert (asked.precision, asked.optimizer, asked.prediction_layers) == ("mixed", "lion", 1)
    assert asked.recompute_modules == ["core_attn", "mlp"]
    assert (asked.frozen, asked.lora_rank) == (["embedding", "0-1"], 8)
    assert asked.target_modules == ["q_proj", "v_proj"]
    assert asked.layers_to_transform == ["0"]
    assert (asked.options.effort, asked.options.time_limit) == ("quick", 2.5)
    assert form_of(asked.model_dump(mode="json")).document() == document
    assert LayoutForm.parse({**FIELDS, "name": ["four"]}).document() == document | {"name": "four"}
    packed = LayoutForm.parse({**FIELDS, "frozen_dtype": ["nf4"], "executor": ["torch"]}).document()
    assert read_layouts(LayoutRequest.model_validate(packed)).setting.model.frozen_dtype == "nf4"
    first = LayoutForm.parse({**FIELDS, "recompute": ["full"], "recompute_layers": ["1"]}).document()
    assert first["fixed"]["recompute_layers"] == 1
    assert read_layouts(LayoutRequest.model_validate(first)).fixed.recompute_layers == 1


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"time_limit": ["nan"]}, "Options, time limit"),
        ({"recompute_layers": ["x"]}, "Fixed, recompute layers"),
        ({"profiles_json": ["{"]}, "Profiles"),
    ],
)
def test_mistakes_of_a_form_are_at_their_place(fields: dict[str, list[str]], place: str) -> None:
    form = LayoutForm.parse({**FIELDS, **fields})
    with pytest.raises(InvalidInput) as raised:
        form.document()
    assert [each for each, _ in form.with_issues(raised.value).issues] == [place]


def test_measured_layers_replace_estimates() -> None:
    cluster = {"nodes": 1, "gpus_per_node": 2, "device": "h100"}
    small = {"model": {"model": MEASURED_MODEL}, "cluster": cluster, "global_batch": 8}
    asked = LayoutRequest.model_validate({**small, "profiles": [as_estimated()]})
    assert read_layouts(asked).setting.measured is not None
    assert form_of(asked.model_dump(mode="json")).document()["profiles"] == asked.profiles


def test_requests_that_differ_in_their_names_are_one_search() -> None:
    document = LayoutForm.parse(FIELDS).document()
    made = [new_layout_search(Settings(), document | {"name": name}) for name in ("one", "two", None)]
    assert [each.name for each in made] == ["one", "two", None]
    assert len({(each.request_key, each.problem) for each in made}) == 1
