"""The command ``python -m benchmarks``. Everything heavy is imported by the benchmark that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zbv_solver.commands.messages import contradiction
from zbv_solver.errors import ContradictedBound, InfeasibleMemory, InvalidInput
from zbv_worker.errors import InvalidRun, WorkerError

from benchmarks.findings import BenchmarkError, WrongInput
from benchmarks.planner.cli import add_planner
from benchmarks.published.cli import add_published
from benchmarks.service.cli import add_service
from benchmarks.soak.run import add_soak
from benchmarks.worker.cli import add_worker

DONE, FAILED, WRONG, CONTRADICTION, INTERRUPTED = 0, 1, 2, 70, 130
EPILOG = """\
exit status: 0 done, and every target was met; 1 a target was missed or a measurement failed; 2 the input is
wrong; 70 a plan contradicts a lower bound (a bug in zbv: a file keeps the problem); 130 interrupted.
docs/benchmarks.md explains every benchmark.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except ContradictedBound as error:
        _complain(contradiction(error))
        return CONTRADICTION
    except InvalidInput as error:
        for message in (*error.issues, *filter(None, [error.rest])):
            _complain(message)
        return WRONG
    except (WrongInput, InvalidRun, InfeasibleMemory) as error:
        _complain(error)
        return WRONG
    except (BenchmarkError, WorkerError) as error:
        _complain(error)
        return FAILED
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}. Check the path and its permissions.")
        return WRONG
    except KeyboardInterrupt:
        _complain("interrupted.")
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the planner, the service and the worker.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True)
    for add in (add_planner, add_published, add_soak, add_service, add_worker):
        add(commands)
    return parser


def _complain(message: object) -> None:
    print(f"benchmarks: {message}", file=sys.stderr)
