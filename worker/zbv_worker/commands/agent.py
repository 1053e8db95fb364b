"""``zbv-worker agent``: options and execution."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from zbv_service.client.flags import add_server
from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import positive, positive_number

_EXAMPLES = """\
examples:
  zbv-worker agent --server http://planner:8000 --allow-model 'mypackage.models.*' \\
      --allow-checkpoint-dir /shared --path /opt/models
  zbv-worker agent --server http://planner:8000 --allow-model zbv_worker.models.gpt --slots 2

A pattern is compared with the module of a run's model, or with module:factory if it contains a colon. *
matches anything: mypackage.models.* allows mypackage.models and all modules below it. A model's module is
code, and matching modules are executed on this node. So are scripts: their absolute path is compared, links
resolved, and * matches slashes too.
"""
_DEFAULT_STATE = Path("zbv-agent")


def add_agent(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    agent = commands.add_parser(
        "agent",
        help="offer this node to a service and run the work that it assigns (a daemon)",
        description="Offer this node to a service and run its share of runs. After SIGTERM the current run "
        "may finish, and the node deregisters.",
        epilog=_EXAMPLES,
    )
    add_server(agent, default=None)
    agent.add_argument(
        "--allow-model",
        metavar="PATTERN",
        action="append",
        default=[],
        help="a model that may be loaded here; may be repeated. Without any, this node loads none",
    )
    agent.add_argument(
        "--allow-script",
        metavar="PATTERN",
        action="append",
        type=os.path.abspath,
        default=[],
        help="the path of a script that may be run here, such as /shared/train.py or '/shared/*'; may be "
        "repeated. Without any, this node runs none",
    )
    agent.add_argument(
        "--allow-checkpoint-dir",
        metavar="DIR",
        action="append",
        type=Path,
        default=[],
        help="a directory in and below which runs may keep checkpoints; may be repeated. Without any, this "
        "node refuses runs with checkpoints",
    )
    agent.add_argument(
        "--path",
        metavar="DIR",
        action="append",
        type=Path,
        default=[],
        help="search for models' modules here, before PYTHONPATH; may be repeated. The working directory is "
        "not searched",
    )
    agent.add_argument("--name", default=socket.gethostname(), help="name of this node (default: the host's)")
    agent.add_argument(
        "--address",
        help="host name or IP address at which other nodes reach this one (default: this host's address on "
        "the route to the service)",
    )
    agent.add_argument(
        "--port",
        type=positive,
        help="port of the ranks' rendezvous if this is a run's first node (default: any free port)",
    )
    agent.add_argument(
        "--slots", type=positive, help="most ranks at the same time (default: number of GPUs, else of cores)"
    )
    agent.add_argument(
        "--state-dir",
        metavar="DIR",
        type=Path,
        default=_DEFAULT_STATE,
        help="directory of logs and results, one folder per run; every agent needs its own, also on a file "
        "system that nodes share (default: ./zbv-agent)",
    )
    agent.add_argument(
        "--drain-seconds",
        type=positive_number,
        default=60.0,
        metavar="S",
        help="how long a run may continue after SIGTERM (default 60); a second SIGTERM ends it at once",
    )
    agent.add_argument(
        "--keep-days",
        type=positive_number,
        default=7.0,
        metavar="N",
        help="how long to keep the folders of ended runs in the state directory (default 7)",
    )
    agent.add_argument(
        "--check",
        action="store_true",
        help="report whether the agent with this state directory is running, and exit: status 0 if it is",
    )
    agent.set_defaults(execute=execute)


def _require_address(server: str | None) -> None:
    """Refuse a wrong address at once, because the agent waits for a service that does not answer."""
    from zbv_worker.errors import InvalidRun

    if not server:
        raise InvalidRun("no service given; pass --server URL, or set ZBV_SERVER.")
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRun(f"--server: found {server!r}; must be an address such as http://planner:8000.")


def _search_path(given: Sequence[Path]) -> tuple[Path, ...]:
    from zbv_worker.errors import InvalidRun

    for directory in given:
        if not directory.is_dir():
            raise InvalidRun(f"--path: found {str(directory)!r}; must be a directory on this node.")
    return tuple(directory.absolute() for directory in given)


def execute(parsed: argparse.Namespace) -> int:
    """Run an agent until a signal ends it; returns the exit status."""
    if parsed.check:
        from zbv_worker.agent.heartbeat import check

        print(check(parsed.state_dir.resolve(), time.time()))
        return 0
    _require_address(parsed.server)
    from zbv_worker.agent.daemon import Agent
    from zbv_worker.agent.policy import AgentOptions
    from zbv_worker.host import inventory

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if not (parsed.allow_model or parsed.allow_script):
        logging.warning(
            "this agent allows no model and no script, so it can take no run. Start it with --allow-model or "
            "--allow-script."
        )
    devices, slots = inventory.devices()
    options = AgentOptions(
        server=parsed.server,
        name=parsed.name,
        address=parsed.address or inventory.address_towards(parsed.server),
        slots=parsed.slots or slots,
        state_dir=parsed.state_dir.resolve(),
        allowed_models=tuple(parsed.allow_model),
        allowed_scripts=tuple(parsed.allow_script),
        checkpoint_directories=tuple(directory.absolute() for directory in parsed.allow_checkpoint_dir),
        path=_search_path(parsed.path),
        devices=tuple(devices),
        port=parsed.port,
        drain_seconds=parsed.drain_seconds,
        keep_days=parsed.keep_days,
    )
    Agent(options).run()
    return 0
