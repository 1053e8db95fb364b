"""``zbv-service run``: start a run of a plan or a problem in a service, and follow it to its end.

The command needs neither the web framework nor torch. The run belongs to the service, so it continues when
the command ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from zbv_service.client.flags import add_server
from zbv_service.commands.arguments import (
    DONE,
    FAILED,
    INTERRUPTED,
    Stop,
    WrongInput,
    connected,
    finite,
    flag_of,
    json_object,
    read_json,
    refused,
)
from zbv_service.commands.submit import add_effort

if TYPE_CHECKING:
    from zbv_service.client import Client, Run

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 5.0
AWAY_SECONDS = 300.0
"""How long to wait for a service that does not answer. Meanwhile the run continues without it."""

_EXAMPLES = """\
examples:
  zbv-service run plan.json --model mypackage.models:gpt --nodes 4 --steps 1000
  zbv-service run problem.json --model mypackage.models:gpt --nodes 4 --steps 1000 \\
      --checkpoint-dir /shared/run --checkpoint-every 100 --replan auto
  zbv-service run plan.json --script train.py --nodes 2 -- --learning-rate 0.001
  zbv-service run --plan 5f3c… --model mypackage.models:gpt --model-args '{"layers": 8}' --nodes 2 --steps 10

exit status: 0 the run succeeded; 1 it failed or was cancelled, or the service cannot be reached;
2 the input is wrong; 130 interrupted, and the run continues."""


_COUNT = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "backend": ("gloo for CPUs, nccl for GPUs (default: gloo)", {"choices": ("gloo", "nccl")}),
    "timeout": ("how long a rank waits for a tensor (default: 120)", {"type": finite, "metavar": "SECONDS"}),
    "startup_timeout": (
        "how long a rank waits for others to start, and for a tensor of the first step (default: 1800)",
        {"type": finite, "metavar": "SECONDS"},
    ),
    "threads": ("compute threads per rank on CPUs", _COUNT),
    "data_parallel": ("replicas of the pipeline (default: 1)", _COUNT),
    "shard": (
        "divide parameters, gradients and optimizer state among the replicas",
        {"action": "store_const", "const": True},
    ),
    "precision": (
        "precision of the computation (default: float32)",
        {"choices": ("float32", "bfloat16", "float16")},
    ),
    "compile": ("compile every layer with torch.compile", {"action": "store_const", "const": True}),
    "main_gradients": (
        "sum gradients of parameters in half precision in float32 (default), or in their own dtype",
        {"action": argparse.BooleanOptionalAction},
    ),
    "accumulate": ("runs of the plan per step, before the optimizer's step (default: 1)", _COUNT),
    "clip_norm": ("clip the norm of the whole gradient to this", {"type": finite, "metavar": "NORM"}),
    "non_finite": (
        "what to do with a step whose loss or gradients are not finite (default: fail)",
        {"choices": ("fail", "skip", "continue")},
    ),
    "evaluate_every": ("steps between evaluations", _COUNT),
    "retries": ("how often to restart the run after a failure (default: 3)", _COUNT),
    "replan": (
        "when measured costs favour another plan: switch to it, suggest it, or do nothing (default: off)",
        {"choices": ("auto", "ask", "off")},
    ),
    "replan_threshold": (
        "relative difference between measured and planned costs that starts replanning (default: 0.05)",
        {"type": finite, "metavar": "SHARE"},
    ),
}
"""The options of a run that have a flag: its help, and the other arguments of ``add_argument``."""
_SEARCH = ("effort", "time_limit", "seed")
_SOURCES = {
    "/name": "--name",
    "/plan_id": "--plan",
    "/model/factory": "--model",
    "/model/arguments": "--model-args",
    "/model/seed": "--model-seed",
    "/script/path": "--script",
    "/script/arguments": "arguments after --",
    "/nodes": "--nodes",
    "/steps": "--steps",
    **{f"/options/{name}": flag_of(name) for name in _OPTIONS},
    "/options/checkpoint/directory": "--checkpoint-dir",
    "/options/checkpoint/every": "--checkpoint-every",
    "/options/checkpoint/sync": "--checkpoint-sync",
    **{f"/search_options/{name}": flag_of(name) for name in _SEARCH},
}
"""The flags from which the parts of the request come."""


def add_run(commands: Any) -> None:
    """Add the command."""
    run = commands.add_parser(
        "run",
        help="let a service run a plan on its agents",
        description="Start a training run in a service and follow it. The service first plans a problem, "
        "and\nfirst imports a plan file. Ctrl-C stops following; the run continues.",
        epilog=_EXAMPLES,
    )
    run.add_argument("file", nargs="?", help="plan or problem file (JSON); - is standard input")
    run.add_argument("--plan", metavar="ID", help="id of a plan in the service, instead of a file")
    program = run.add_mutually_exclusive_group(required=True)
    program.add_argument("--model", metavar="PACKAGE.MODULE:FACTORY", help="callable that makes the model")
    program.add_argument(
        "--script",
        metavar="FILE",
        help="Python script that every rank runs instead; arguments for it follow after --. All nodes must "
        "have it at the same absolute path",
    )
    run.add_argument(
        "--model-args", type=json_object, metavar="JSON", help="keyword arguments of the factory"
    )
    run.add_argument("--model-seed", type=int, metavar="N", help="random seed of the model (default: 0)")
    run.add_argument("--nodes", type=int, required=True, metavar="N", help="number of agents to run on")
    run.add_argument("--steps", type=int, metavar="N", help="number of training steps, with --model")
    run.add_argument("--name", help="name of the run in lists and pages")
    add_server(run)
    run.add_argument(
        "--cancel-on-interrupt", action="store_true", help="Ctrl-C cancels the run instead of leaving it"
    )
    options = run.add_argument_group("options of the run")
    for name, (text, arguments) in _OPTIONS.items():
        options.add_argument(flag_of(name), help=text, **arguments)
    options.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="where to write checkpoints: an absolute path that all nodes share and their agents allow",
    )
    options.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="steps between two checkpoints (default: 100)"
    )
    options.add_argument(
        "--checkpoint-sync",
        action="store_true",
        help="wait until each checkpoint is written (default: write it in the background)",
    )
    search = run.add_argument_group("options of the search, for a problem and for replanning")
    add_effort(search, default=None)
    search.add_argument("--time-limit", type=finite, metavar="SECONDS", help="end the search after this time")
    search.add_argument("--seed", type=int, metavar="N", help="random seed of the search (default: 0)")
    run.rest = "script_arguments"
    run.set_defaults(run=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Start the run and follow it; returns the exit status.

    Raises
    ------
    Stop
        When the service refuses the run or cannot be reached, or flags contradict each other.
    """
    from zbv_service.client import ClientError, InvalidRequest

    body = request_of(parsed)
    if (parsed.file is None) == (parsed.plan is None):
        found = "neither" if parsed.plan is None else "both"
        raise WrongInput(f"found {found} of a file and --plan; give exactly one.")
    document = None if parsed.file is None else read_json(parsed.file)
    with connected(parsed.server) as client:
        plan_id, is_plan = parsed.plan, isinstance(document, dict) and "ranks" in document
        if document is not None and is_plan:
            try:
                plan_id = client.import_plan(document)
            except InvalidRequest as error:
                raise refused(error, {"": parsed.file}) from None
        try:
            run = client.submit_run(plan_id, **body, problem=None if is_plan else document)
        except InvalidRequest as error:
            raise refused(error, {**_SOURCES, "/problem": parsed.file}) from None
        except ClientError as error:
            raise Stop(
                FAILED,
                f"{error} The service may nevertheless have started the run: check {client.base_url}/runs "
                f"before you submit it again.",
            ) from None
        print(run.id, flush=True)  # the result, for scripts
        return follow_or_leave(client, run, cancels=parsed.cancel_on_interrupt)


def request_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """The API's request for the flags, without plan and problem; raises :class:`WrongInput`."""
    options = _given(parsed, _OPTIONS)
    if parsed.checkpoint_dir is None and parsed.checkpoint_every is not None:
        raise WrongInput("found --checkpoint-every without --checkpoint-dir; give both.")
    if parsed.checkpoint_dir is None and parsed.checkpoint_sync:
        raise WrongInput("found --checkpoint-sync without --checkpoint-dir; give both.")
    if parsed.checkpoint_dir is not None:
        if not parsed.checkpoint_dir.startswith("/"):
            raise WrongInput(
                f"--checkpoint-dir: found {parsed.checkpoint_dir!r}; must be an absolute path that all nodes "
                f"share and their agents allow (--allow-checkpoint-dir), such as /shared/run1."
            )
        every = 100 if parsed.checkpoint_every is None else parsed.checkpoint_every
        options["checkpoint"] = {"directory": parsed.checkpoint_dir, "every": every}
        if parsed.checkpoint_sync:
            options["checkpoint"]["sync"] = True
    return {
        **_program(parsed),
        "name": parsed.name,
        "nodes": parsed.nodes,
        "steps": parsed.steps,
        "options": options,
        "search_options": _given(parsed, _SEARCH) or None,
    }


def _program(parsed: argparse.Namespace) -> dict[str, Any]:
    """The model or the script; raises :class:`WrongInput`."""
    if parsed.script is None:
        if parsed.script_arguments:
            raise WrongInput("found arguments after --, which are for a script; give --script.")
        if parsed.steps is None:
            raise WrongInput("--model needs the number of training steps; give --steps.")
        arguments, seed = parsed.model_args or {}, parsed.model_seed or 0
        return {"model": {"factory": parsed.model, "arguments": arguments, "seed": seed}}
    for name in ("model_args", "model_seed"):
        if getattr(parsed, name) is not None:
            raise WrongInput(f"{flag_of(name)} is for a model; pass arguments of the script after --.")
    return {"script": {"path": os.path.abspath(parsed.script), "arguments": parsed.script_arguments}}


def _given(parsed: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}


def follow_or_leave(client: Client, run: Run, *, cancels: bool) -> int:
    """Follow a run to its end; returns the exit status. Ctrl-C cancels the run or leaves it."""
    from zbv_service.client import ClientError

    address = f"{client.base_url}/runs/{run.id}"
    _say(f"run {run.id}{f' {run.name}' if run.name else ''} ({address})")
    try:
        ended = _follow_or_cancel(client, run.id, cancels)
    except KeyboardInterrupt:
        _say(f"run {run.id} continues. {ways_to_cancel(client, run.id)}")
        return INTERRUPTED
    except ClientError as error:
        raise Stop(FAILED, f"{error} The run continues without the service; see {address} later.") from None
    return DONE if ended.state == "succeeded" else FAILED


def ways_to_cancel(client: Client, id_: str) -> str:
    """What to say of a search or run that continues."""
    return f"To cancel it:\n  zbv-service cancel {id_} --server {client.base_url}"


def _follow_or_cancel(client: Client, run_id: str, cancels: bool) -> Run:
    try:
        return follow(client, run_id)
    except KeyboardInterrupt:
        if not cancels:
            raise
    _say(f"cancelling run {run_id}; press Ctrl-C again to leave it")
    client.cancel_run(run_id)
    return follow(client, run_id)


def follow(client: Client, run_id: str) -> Run:
    """Print the events of a run until it ends, and return the ended run.

    Waits up to :data:`AWAY_SECONDS` for a service that does not answer, and then raises its error.
    """
    from zbv_service.client import ServiceUnreachable

    last, answered, progress_at, missing = 0, time.monotonic(), time.monotonic(), ""
    while True:
        try:
            run = client.run(run_id)  # before the events, so that an ended run has no later ones
            events = client.run_events(run_id, last)
        except ServiceUnreachable as error:
            if time.monotonic() - answered > AWAY_SECONDS:
                raise
            _say(f"{error} Waiting for it; the run continues meanwhile.")
            time.sleep(POLL_SECONDS)
            continue
        answered = time.monotonic()
        for event in events:
            at = datetime.fromisoformat(event["at"]).astimezone().strftime("%H:%M:%S")
            _say(f"{at} {event['kind']}{': ' if event['detail'] else ''}{event['detail']}")
            last = event["id"]
        if run.is_finished:
            if text := curve(_steps(client, run_id)):
                _say(text)
            return run
        if (found := run.document.get("waits_for") or "") != missing:
            missing = found
            if missing:
                _say(f"waits for {missing}")
        if answered - progress_at >= PROGRESS_SECONDS and (text := progress(run, _steps(client, run_id))):
            progress_at = answered
            _say(text)
        time.sleep(POLL_SECONDS)


def _steps(client: Client, run_id: str) -> list[dict[str, Any]]:
    """The measured steps; none while the service is away, because following a run does not depend on them."""
    from zbv_service.client import ServiceUnreachable

    try:
        return client.run_steps(run_id)
    except ServiceUnreachable:
        return []


def progress(run: Run, steps: Sequence[Mapping[str, Any]]) -> str:
    """The last step that the slowest rank reported, and the newest measured one; empty before the first."""
    step = last_step(run)
    if step is None:
        return ""
    of_all = "" if run.document["steps"] is None else f" of {run.document['steps']}"
    measured = f"; step {steps[-1]['step']}: {_measured(steps[-1])}" if steps else ""
    return f"last reported step {step}{of_all}{measured}"


def last_step(run: Run) -> int | None:
    """The last step that the slowest rank reported; None before the first report."""
    places = [rank["step"] for node in run.document["members"] for rank in node["ranks"]]
    return min((step for step in places if step is not None), default=None)


def curve(steps: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last of the measured steps; empty without any."""
    ends = [steps[0], steps[-1]] if len(steps) > 1 else steps
    return "; ".join(f"step {step['step']}: {_measured(step)}" for step in ends)


def _measured(step: Mapping[str, Any]) -> str:
    from zbv_solver.export import quantities

    loss = "" if step["loss"] is None else f"loss {quantities.figure(step['loss'])}, "
    return f"{loss}{quantities.time(step['seconds'], quantities.SECONDS)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
