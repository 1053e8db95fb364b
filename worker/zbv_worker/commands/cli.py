"""The ``zbv-worker`` command: its subcommands and exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zbv_service.client.flags import apply_credentials
from zbv_service.client.tokens import CredentialsUnusable
from zbv_solver.commands.parser import Parser

from zbv_worker.commands.agent import add_agent
from zbv_worker.commands.check import add_check
from zbv_worker.commands.estimate import add_estimate
from zbv_worker.commands.profile import add_profile
from zbv_worker.commands.rehearse import add_rehearse
from zbv_worker.commands.run import add_run
from zbv_worker.host.environment import add_working_directory

_EXIT_FAILED, _EXIT_WRONG_INPUT = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 success, 1 failure, 2 wrong input, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = _parser().parse_args(given)
    parsed.arguments = given  # for commands that start ranks with the same arguments
    apply_credentials(parsed)
    from zbv_worker.errors import EXIT_INTERRUPTED, WorkerError, print_error
    from zbv_worker.host.local_ranks import LaunchError

    if parsed.command != "agent":
        add_working_directory()
    try:
        status: int = parsed.execute(parsed)
        return status
    except LaunchError as error:
        print_error(error)
        # Wrong input of a rank that was started here is wrong input of this command.
        return _EXIT_WRONG_INPUT if error.status == _EXIT_WRONG_INPUT else _EXIT_FAILED
    except WorkerError as error:
        return print_error(error)
    except CredentialsUnusable as error:
        print(f"zbv-worker: {error}", file=sys.stderr)
        return _EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        print("zbv-worker: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zbv-worker",
        description="Train models on pipeline plans, and measure what planning needs.",
        epilog="exit status: 0 done; 1 failed; 2 wrong input; 130 interrupted.",
    )
    parser.add_common_flags()
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (add_run, add_profile, add_estimate, add_rehearse, add_check, add_agent):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
