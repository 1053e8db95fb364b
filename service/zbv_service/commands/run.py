"""``zbv-service run``: have a service run a plan or a problem, and follow it to its end.

It needs what the thin client needs: neither the web framework nor torch. The run belongs to the service, so
it goes on when this command ends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from zbv_service.client.flags import add_server
from zbv_service.commands.ending import FAILED, Stop, WrongInput
from zbv_service.commands.files import read_json, require_finite
from zbv_service.commands.refusals import stop_of

if TYPE_CHECKING:
    from zbv_service.client import Client, Run

SUCCEEDED = 0
POLL_SECONDS = 0.5
PROGRESS_SECONDS = 5.0
AWAY_SECONDS = 300.0
"""How long a service that does not answer is waited for; the run itself does not need it meanwhile."""

_EXAMPLES = """\
examples:
  zbv-service run plan.json --model mypackage.models:gpt --nodes 4 --steps 1000
  zbv-service run problem.json --model mypackage.models:gpt --nodes 4 --steps 1000 \\
      --checkpoint-dir /shared/run --checkpoint-every 100 --replan auto
  zbv-service run --plan 5f3c… --model mypackage.models:gpt --model-args '{"layers": 8}' --nodes 2 --steps 10

exit status: 0 the run succeeded; 1 it failed or was cancelled, or the service cannot be reached;
2 the input is wrong."""


@dataclass(frozen=True)
class Option:
    """A flag that is an option of the run of the same name."""

    flag: str
    help: str
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As the API calls it."""
        return self.flag.removeprefix("--").replace("-", "_")


_OPTIONS = (
    Option("--backend", "gloo for CPUs, nccl for GPUs (default gloo)", {"choices": ("gloo", "nccl")}),
    Option("--timeout", "longest wait for a tensor (default 120)", {"type": float, "metavar": "SECONDS"}),
    Option("--threads", "compute threads per rank on CPU", {"type": int, "metavar": "N"}),
    Option("--data-parallel", "replicas of the pipeline (default 1)", {"type": int, "metavar": "N"}),
    Option(
        "--shard",
        "shard parameters and optimizer over the replicas",
        {"action": "store_const", "const": True},
    ),
    Option(
        "--precision",
        "of the computation (default float32)",
        {"choices": ("float32", "bfloat16", "float16")},
    ),
    Option("--clip-norm", "largest norm of the whole gradient", {"type": float, "metavar": "NORM"}),
    Option(
        "--non-finite",
        "what to do with a step whose loss or gradients are not finite (default fail)",
        {"choices": ("fail", "skip", "continue")},
    ),
    Option("--evaluate-every", "steps between evaluations", {"type": int, "metavar": "N"}),
    Option("--retries", "how often a failure is tried again (default 3)", {"type": int, "metavar": "N"}),
    Option(
        "--replan",
        "what to do when measured costs call for another plan (default off)",
        {"choices": ("auto", "ask", "off")},
    ),
    Option(
        "--replan-threshold",
        "by which share costs must differ (default 0.05)",
        {"type": float, "metavar": "SHARE"},
    ),
)
_SUCH_AS = "give a JSON object such as '{\"layers\": 8}'."


def add_run(commands: Any) -> None:
    """Add the command."""
    run = commands.add_parser(
        "run",
        help="have a service run a plan on its agents",
        description="Submit a run to a service and follow it. A problem is planned first; a plan made\n"
        "elsewhere is imported first. Ctrl-C stops following, not the run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("file", nargs="?", help="plan or problem file (JSON); - is standard input")
    run.add_argument("--plan", metavar="ID", help="a plan that the service has, instead of a file")
    run.add_argument("--model", required=True, metavar="PACKAGE.MODULE:FACTORY", help="what to train")
    run.add_argument("--model-args", default="{}", metavar="JSON", help="keyword arguments of the factory")
    run.add_argument("--model-seed", type=int, default=0, metavar="N", help="of the model (default 0)")
    run.add_argument("--nodes", type=int, required=True, metavar="N", help="agents to run on")
    run.add_argument("--steps", type=int, required=True, metavar="N", help="steps to train")
    add_server(run)
    run.add_argument(
        "--cancel-on-interrupt", action="store_true", help="Ctrl-C cancels the run instead of leaving it"
    )
    options = run.add_argument_group("options of the run")
    for option in _OPTIONS:
        options.add_argument(option.flag, help=option.help, **option.more)
    options.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="absolute path, shared by all nodes and allowed by their agents",
    )
    options.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="steps between two checkpoints (default 100)"
    )
    search = run.add_argument_group("options of the search, for a problem and for replanning")
    search.add_argument("--effort", choices=("quick", "standard", "thorough"))
    search.add_argument("--time-limit", type=float, metavar="SECONDS")
    search.add_argument("--seed", type=int)
    run.set_defaults(run=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Submit the run and follow it; returns the exit status.

    Raises
    ------
    Stop
        When the service refuses it or cannot be reached, or flags contradict each other.
    """
    from zbv_service.client import Client, ClientError, InvalidRequest

    body = request_of(parsed)
    if (parsed.file is None) == (parsed.plan is None):
        found = "neither" if parsed.plan is None else "both"
        raise WrongInput(f"found {found} of a file and --plan; give exactly one.")
    document = None if parsed.file is None else read_json(parsed.file)
    require_finite(body, document)
    with Client(parsed.server) as client:
        try:
            run = _submit(client, body, parsed.plan, document)
        except InvalidRequest as error:
            raise stop_of(error, "the run") from None
        except ClientError as error:
            raise Stop(
                FAILED,
                f"{error} The service may have accepted the run all the same: look at {client.base_url}/runs "
                f"before you submit it again.",
            ) from None
        print(run.id, flush=True)  # the result, for scripts
        return _follow_or_leave(client, run, cancels=parsed.cancel_on_interrupt)


def request_of(parsed: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as the API's request without plan and problem; raises :class:`WrongInput`."""
    options = {
        option.name: getattr(parsed, option.name)
        for option in _OPTIONS
        if getattr(parsed, option.name) is not None
    }
    if parsed.checkpoint_dir is None and parsed.checkpoint_every is not None:
        raise WrongInput(
            "found --checkpoint-every without --checkpoint-dir; say where checkpoints are to be."
        )
    if parsed.checkpoint_dir is not None:
        if not parsed.checkpoint_dir.startswith("/"):
            raise WrongInput(
                f"--checkpoint-dir: found {parsed.checkpoint_dir!r}; must be an absolute path that all nodes "
                f"share and their agents allow (--allow-checkpoint-dir), such as /shared/run1."
            )
        every = 100 if parsed.checkpoint_every is None else parsed.checkpoint_every
        options["checkpoint"] = {"directory": parsed.checkpoint_dir, "every": every}
    search = {
        name: getattr(parsed, name)
        for name in ("effort", "time_limit", "seed")
        if getattr(parsed, name) is not None
    }
    try:
        arguments = json.loads(parsed.model_args)
    except ValueError as error:
        raise WrongInput(f"--model-args: not JSON ({error}); {_SUCH_AS}") from None
    if not isinstance(arguments, dict):
        raise WrongInput(f"--model-args: found {parsed.model_args}; {_SUCH_AS}")
    return {
        "model": {"factory": parsed.model, "arguments": arguments, "seed": parsed.model_seed},
        "nodes": parsed.nodes,
        "steps": parsed.steps,
        "options": options,
        "search_options": search or None,
    }


def _submit(client: Client, body: dict[str, Any], plan_id: str | None, document: Any) -> Run:
    is_plan = isinstance(document, dict) and "ranks" in document
    if is_plan:
        plan_id = client.import_plan(document)
    return client.submit_run(plan_id, **body, problem=None if is_plan else document)


def _follow_or_leave(client: Client, run: Run, *, cancels: bool) -> int:
    from zbv_service.client import ClientError

    address = f"{client.base_url}/v1/runs/{run.id}"
    _say(f"run {run.id} ({address})")
    try:
        ended = _follow_or_cancel(client, run.id, cancels)
    except KeyboardInterrupt:
        token = f"$(zbv-service token show-local --server {client.base_url})"
        _say(
            f"run {run.id} goes on; to cancel it:\n"
            f'  curl -X POST -H "Authorization: Bearer {token}" {address}/cancel'
        )
        return FAILED
    except ClientError as error:
        raise Stop(FAILED, f"{error} The run itself needs no service; see {address} later.") from None
    return SUCCEEDED if ended.state == "succeeded" else FAILED


def _follow_or_cancel(client: Client, run_id: str, cancels: bool) -> Run:
    try:
        return follow(client, run_id)
    except KeyboardInterrupt:
        if not cancels:
            raise
    _say(f"cancelling run {run_id}; Ctrl-C again leaves it")
    client.cancel_run(run_id)
    return follow(client, run_id)


def follow(client: Client, run_id: str) -> Run:
    """Say what happens to a run until it has ended.

    A service that does not answer is waited for :data:`AWAY_SECONDS`; then its error is raised.
    """
    from zbv_service.client import ServiceUnreachable

    last, answered, said_at, lack = 0, time.monotonic(), time.monotonic(), ""
    while True:
        try:
            run = client.run(run_id)  # before its events: of a run that has ended these are all
            events = client.run_events(run_id, last)
        except ServiceUnreachable as error:
            if time.monotonic() - answered > AWAY_SECONDS:
                raise
            _say(f"{error} Waiting for it; the run does not need it meanwhile.")
            time.sleep(POLL_SECONDS)
            continue
        answered = time.monotonic()
        for event in events:
            at = datetime.fromisoformat(event["at"]).astimezone().strftime("%H:%M:%S")
            _say(f"{at} {event['kind']}{': ' if event['detail'] else ''}{event['detail']}")
            last = event["id"]
        if run.is_finished:
            return run
        if (found := run.document.get("waits_for") or "") != lack:
            lack = found
            if lack:
                _say(f"waits for {lack}")
        if answered - said_at >= PROGRESS_SECONDS and (text := progress(run)):
            said_at = answered
            _say(text)
        time.sleep(POLL_SECONDS)


def progress(run: Run) -> str:
    """The last reported step of a run's slowest rank; nothing before there is one."""
    steps = [rank["step"] for node in run.document["members"] for rank in node["ranks"]]
    known = [step for step in steps if step is not None]
    return f"last reported step {min(known)} of {run.document['steps']}" if known else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
