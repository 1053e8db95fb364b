"""``zbv-service layout``: let a service search layouts, follow the search, and write the answer."""

from __future__ import annotations

import argparse
from math import isfinite
from typing import TYPE_CHECKING, Any

from zbv_solver.commands.parser import Parser

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import (
    EPILOG,
    WrongInput,
    flag_of,
    read_json,
)
from zbv_service.commands.submit import add_ending, search_to_end

if TYPE_CHECKING:
    from zbv_service.client import Client, Search

_EXAMPLES = """\
examples:
  zbv-service layout --preset llama-3.1-8b --cluster cluster.json --global-batch 64 -o layouts.json
  zbv-service layout model.json --cluster cluster.json --tensor-parallel 8 --top 5 -o layouts.json

"""
_REQUEST = (
    *("name", "global_batch", "sequence_length"),
    *("prediction_layers", "frozen", "frozen_dtype"),
    *("lora_rank", "target_modules", "layers_to_transform"),
    *("top", "executor", "points", "sensitivity"),
)
_OPTIONS = ("effort", "time_limit")


def add_layout(commands: Any) -> None:
    """Add the command."""
    layout = commands.add_parser(
        "layout",
        help="let a service search the best layouts of a model on a cluster",
        description="Submit a model and a cluster to a running service, follow the search, and write the\n"
        "layouts; each names the plan of its pipeline, which the service stores.\n"
        "Ctrl-C ends the search and writes the layouts planned so far.",
        epilog=_EXAMPLES + EPILOG,
    )
    layout.on_use = _add_flags
    layout.set_defaults(run=_layout)


def _add_flags(layout: Parser) -> None:
    from zbv_solver.commands.model_flags import add_layout_flags

    add_layout_flags(layout)
    add_server(layout)
    add_ending(layout, "the layouts")


def _layout(parsed: argparse.Namespace) -> int:
    body, sources = _body(parsed)

    def submit(client: Client) -> Search:
        return client.submit_layouts(body)

    return search_to_end(parsed, submit, sources, "layouts", lambda _client, found: found.answer)


def _body(parsed: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """The request, and where its parts come from."""
    from zbv_solver.commands.model_flags import FLAGS, KEPT, read_adapter
    from zbv_solver.errors import InvalidInput

    keys = (*_REQUEST, *KEPT)
    if parsed.model is None and not parsed.preset:
        raise WrongInput("model, --preset: found neither; give one of them.")
    if parsed.model is not None and parsed.preset:
        raise WrongInput(
            "model, --preset: found both; name the presets in the model, under the key `presets`."
        )
    if parsed.time_limit is not None and not isfinite(parsed.time_limit):
        raise WrongInput(f"--time-limit: found {parsed.time_limit}; must be a positive number of seconds.")
    try:
        read_adapter(parsed)
    except InvalidInput as error:
        raise WrongInput(str(error)) from None
    model = {"presets": parsed.preset} if parsed.model is None else read_json(parsed.model)
    model = _measured(model, parsed.sequence_length)
    fixed = {name: getattr(parsed, name) for name in FLAGS if getattr(parsed, name) is not None}
    options = {name: getattr(parsed, name) for name in _OPTIONS}
    body = {"model": model, "cluster": read_json(parsed.cluster), "fixed": fixed, "options": options}
    body |= {name: getattr(parsed, name) for name in keys if getattr(parsed, name) is not None}
    body["profiles"] = [read_json(path) for path in parsed.profile]
    sources = {
        "/model": parsed.model or "--preset",
        "/cluster": parsed.cluster,
        **{f"/{name}": flag_of(name) for name in keys},
        "/fixed": ", ".join(map(flag_of, fixed)),
        **{f"/fixed/{name}": flag_of(name) for name in FLAGS},
        **{f"/options/{name}": flag_of(name) for name in _OPTIONS},
        **{f"/profiles/{at}": path for at, path in enumerate(parsed.profile)},
    }
    return body, sources


def _measured(model: Any, sequence: int | None) -> Any:
    """The sizes of a ``config.json`` of a type that the service does not read, which are measured here.

    Raises :class:`WrongInput` as :func:`~zbv_models.estimate.transformers_config.read_config` does.
    """
    from zbv_models.estimate.transformers_config import needs_transformers, read_config
    from zbv_solver.errors import InvalidInput

    if not needs_transformers(model):
        return model
    if sequence is None:
        detail = "a config.json does not say how long sequences are in training. Give their number of tokens."
        raise WrongInput(f"--sequence-length: {detail}")
    try:
        return {"model": read_config(model, sequence)}
    except InvalidInput as error:
        raise WrongInput(str(error)) from None
