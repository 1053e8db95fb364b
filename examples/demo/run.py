"""Profiles, plans, trains and compares on this machine: ``python -m examples.demo``.

It measures the stages of a small GPT, a service plans them, and local ranks fetch their lists and train: in
turns with this plan, with 1F1B and with interleaved 1F1B, all planned from the same measurements. All printed
numbers were measured in this run. With ``--example``, as in ``make run``, a training script follows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from zbv_service.client import Client, ClientError, Search
from zbv_service.client.tokens import FILE_VARIABLE, TOKEN_VARIABLE
from zbv_solver.export.quantities import SECONDS, percent, relative, time
from zbv_solver.plans.plan import Plan, plan_json
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.writing import problem_json
from zbv_worker.commands.arguments import positive
from zbv_worker.errors import WorkerError
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.host.process import usable_cores
from zbv_worker.measure.profile.profile import ProfileOptions, profile
from zbv_worker.model.spec import ModelSpec
from zbv_worker.tracing.report import RunSummary, read_reports, summarise

from examples.demo.example import run_example
from examples.demo.local_service import LocalService, port_or_free

MICROBATCHES = 8
LAYERS_PER_STAGE = 2
WIDTH = 192
MODEL_SIZE = {"heads": 6, "length": 128, "sequences": 2}
WARM_UP_STEPS = 2
LOSS_TOLERANCE = 1e-2
"""Schedules sum gradients in different orders, and training amplifies rounding; more than this is a bug."""

_CALM = 0.15
"""Relative scatter of step times from which other programs have probably disturbed them."""

_RUN_TIMEOUT = 600.0
_SEARCH_TIMEOUT = 300.0
_PROFILE_ROUNDS = 12
_BASELINES = {"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"}


class DemoFailed(WorkerError):
    """The demonstration failed, or its results are wrong."""


@dataclass(frozen=True)
class ScheduleResult:
    """One schedule, planned and run."""

    name: str
    plan_id: str
    planned: float
    """The plan's span, in seconds."""
    planned_busy: float
    """The plan's time in actions, summed over the ranks, in seconds."""
    run: RunSummary

    @classmethod
    def of(cls, name: str, plan: Plan, run: RunSummary) -> ScheduleResult:
        """Combine a plan, whose times are in microseconds, and its run."""
        orders = plan.orders
        busy = float(plan.problem.arrays.durations(orders.stage, orders.letter, orders.microbatch).sum())
        return cls(name, plan.plan_id, plan.metrics.span / 1e6, busy / 1e6, run)

    @property
    def slowdown(self) -> float:
        """The time in actions, relative to the profile that the plan was made from."""
        return self.run.median_busy(WARM_UP_STEPS) / self.planned_busy


class Demo:
    """The demonstration between the start of the service and the summary.

    Parameters
    ----------
    options
        The command line.
    """

    def __init__(self, client: Client, server: str, options: argparse.Namespace, progress: Progress):
        self._client = client
        self._server = server
        self._folder: Path = options.folder
        self._effort: str = options.effort
        self._steps: int = options.steps
        self._ranks = rank_count()
        self._progress = progress
        layers = LAYERS_PER_STAGE * 2 * self._ranks
        arguments = {"layers": layers, "width": options.width, **MODEL_SIZE}
        self._model = ModelSpec("zbv_worker.models.gpt:gpt", arguments)

    def results(self) -> list[ScheduleResult]:
        """Profile, plan and run; the planner's schedule comes first, then the baselines."""
        from zbv_solver.search.assemble import baseline_plan  # needs zbv[solver]

        problem = self._profile()
        (self._folder / "problem.json").write_text(json.dumps(problem_json(problem), indent=2) + "\n")
        plans = {"zbv": self._client.plan(self._plan(problem))}
        for name, title in _BASELINES.items():
            plans[title] = baseline_plan(name, problem)
            self._client.import_plan(plan_json(plans[title]))
        return self._train(plans)

    def _profile(self) -> Problem:
        options = ProfileOptions(self._model, self._ranks, MICROBATCHES, repeats=_PROFILE_ROUNDS)
        rounds = _PROFILE_ROUNDS + 3
        task = self._progress.add_task(f"measuring {2 * self._ranks} stages", total=rounds)
        problem = profile(options, lambda done: self._progress.update(task, completed=done))
        self._progress.update(task, completed=rounds)
        return problem

    def _plan(self, problem: Problem) -> str:
        """Search a plan on the service; returns its id."""
        task = self._progress.add_task("searching a plan", total=1)
        search = self._client.submit(problem_json(problem), {"effort": self._effort})

        def show(seen: Search) -> None:
            gap = "" if seen.gap is None else f", gap {percent(seen.gap, 1)}"
            self._progress.update(task, description=f"searching a plan ({seen.state}{gap})")

        found = self._client.wait(search.id, show, timeout=_SEARCH_TIMEOUT)
        if found.plan_id is None:
            raise DemoFailed(f"search {found.id} ended without a plan.")
        self._progress.update(task, completed=1)
        return found.plan_id

    def _train(self, plans: Mapping[str, Plan]) -> list[ScheduleResult]:
        """Run the plans in turns, step by step, so that disturbances of the machine affect all of them."""
        folder = self._folder / "runs"
        shutil.rmtree(folder, ignore_errors=True)
        chosen = [argument for plan in plans.values() for argument in ("--plan", plan.plan_id)]
        command = python_command(
            "zbv_worker",
            *("run", "--server", self._server, *chosen, "--pin", "--threads", "1"),
            *("--model", self._model.factory, "--model-args", json.dumps(dict(self._model.arguments))),
            *("--steps", str(self._steps), "--timeout", "60", "--result-dir", str(folder)),
        )
        total = self._steps * len(plans)
        task = self._progress.add_task(f"training with {', '.join(plans)} in turns", total=total)
        with LocalRanks([command] * self._ranks, folder) as ranks:

            def show() -> None:
                lines = (line for rank in range(self._ranks) for line in ranks.log(rank).splitlines())
                self._progress.update(task, completed=sum(line.startswith("step ") for line in lines))

            ranks.wait(_RUN_TIMEOUT, show)
        self._progress.update(task, completed=total)
        return [
            ScheduleResult.of(name, plan, summarise(read_reports(folder / plan.plan_id, self._ranks)))
            for name, plan in plans.items()
        ]


def table(results: Sequence[ScheduleResult]) -> Table:
    """Planned and measured step times, one row per schedule."""
    shown = Table(title="Step time of the same model on the same ranks")
    # Headings short enough for a terminal of 80 columns.
    for column in ("schedule", "planned", "measured", "÷ planned", "÷ profile", "vs 1F1B"):
        shown.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    reference = next(o.run.median_seconds(WARM_UP_STEPS) for o in results if o.name == "1F1B")
    for outcome in results:
        measured = outcome.run.median_seconds(WARM_UP_STEPS)
        shown.add_row(
            outcome.name,
            time(outcome.planned, SECONDS),
            time(measured, SECONDS),
            f"{measured / outcome.planned:.2f}",
            f"{outcome.slowdown:.2f}",
            relative(measured, reference),
        )
    return shown


def check_losses(results: Sequence[ScheduleResult]) -> float:
    """The largest relative difference of any step's loss between schedules.

    Raises
    ------
    DemoFailed
        If it is larger than rounding explains, or if the loss did not decrease.
    """
    first = results[0].run.losses
    worst = max(
        abs(mine - right) / abs(right)
        for outcome in results
        for mine, right in zip(outcome.run.losses, first, strict=True)
    )
    if worst > LOSS_TOLERANCE:
        raise DemoFailed(
            f"the schedules' losses differ by {percent(worst, 1)}; they must train the same model."
        )
    if len(first) > 1 and not first[-1] < first[0]:
        raise DemoFailed(f"the loss did not decrease: {first[0]:.3f} → {first[-1]:.3f}.")
    return worst


def rank_count() -> int:
    """One rank per core, at least two, at most four."""
    return min(4, max(2, len(usable_cores())))


def demonstrate(options: argparse.Namespace, out: Console, err: Console) -> None:
    """Run everything, print the summary, and keep the service running unless ``--exit`` is given."""
    port, cores = port_or_free(options.port), len(usable_cores())
    if port != options.port:
        err.print(f"Port {options.port} is in use; the service listens on a free one.")
    if cores < rank_count():
        err.print(
            f"[yellow]{rank_count()} ranks share {cores} CPU cores, so they fill each other's bubbles: the "
            f"measured times do not compare the schedules."
        )
    for name in (TOKEN_VARIABLE, FILE_VARIABLE):
        os.environ.pop(name, None)  # a token of another service; this one writes its own
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with ExitStack() as stack:
        service = stack.enter_context(LocalService(options.folder, port))
        client = stack.enter_context(Client(service.address))
        err.print(f"Service at {service.address}, state and logs in {options.folder}")
        with Progress(*columns, console=err) as progress:
            results = Demo(client, service.address, options, progress).results()
            example = _example(options, progress)
        _summary(results, options.folder, out)
        for line in example:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        if options.exit:
            command = os.path.relpath(Path(sys.executable).with_name("zbv-service"))
            again = f"{command} serve --database {service.database}"
            out.print(
                f"To view the plan {results[0].plan_id}, start the service again: {again}", soft_wrap=True
            )
        else:
            link = f"{client.sign_in_link()}&next=/plans/{results[0].plan_id}"
            out.print(f"To view the plan, sign in with this link, which works once: {link}", soft_wrap=True)
            out.print("The service keeps running until Ctrl-C.")
            with suppress(KeyboardInterrupt):  # the normal end
                service.wait()


def _example(options: argparse.Namespace, progress: Progress) -> list[str]:
    """Run the example, if one is given; returns what to show of it."""
    if options.example is None:
        return []
    task = progress.add_task(f"training with {options.example}, and resuming", total=1)
    lines = run_example(options.example, options.folder / "example")
    progress.update(task, completed=1)
    return lines


def _summary(results: Sequence[ScheduleResult], folder: Path, out: Console) -> None:
    worst = check_losses(results)
    out.print(table(results))
    out.print(
        f"{rank_count()} ranks, {MICROBATCHES} microbatches. Planned: the plan's span, from stages measured "
        f"on this machine. Measured: the slowest rank's time from the start of its first action to the end "
        f"of its last, without the optimizer; median over the steps after the first {WARM_UP_STEPS}. The "
        f"schedules took turns, step by step. ÷ profile: the time of the actions themselves, relative to the "
        f"profile; the rest of ÷ planned is waiting."
    )
    spread = max(outcome.run.spread(WARM_UP_STEPS) for outcome in results)
    if spread > _CALM:
        out.print(
            f"[yellow]The slowest tenth of the steps took {percent(spread, 0)} longer than the median: other "
            f"programs keep this machine busy, so differences of a few percent mean little. Repeat this on "
            f"an idle machine."
        )
    for outcome in results:
        losses = outcome.run.losses
        out.print(f"Loss of {outcome.name} over {len(losses)} steps: {losses[0]:.4f} → {losses[-1]:.4f}")
    out.print(f"Losses of the schedules agree to {worst:.0e} (relative).")
    report = [asdict(outcome) for outcome in results]
    (folder / "summary.json").write_text(json.dumps(report, indent=2) + "\n")


def _stop(number: int, _frame: object) -> NoReturn:
    # An exception, so that every `with` block ends its processes.
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--exit", action="store_true", help="stop after the summary instead of keeping the service running"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port of the service (default 8000; 0 for any free port)"
    )
    parser.add_argument("--steps", type=positive, default=20, help="training steps per schedule (default 20)")
    parser.add_argument(
        "--width", type=positive, default=WIDTH, help=f"width of the model, a multiple of 6 (default {WIDTH})"
    )
    parser.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        default="standard",
        help="effort of the search (default standard)",
    )
    parser.add_argument(
        "--example",
        type=Path,
        help="also run this training script on two ranks, and let it resume from its checkpoint; it must "
        "take --steps and --checkpoints",
    )
    parser.add_argument(
        "--folder",
        type=lambda text: Path(text).absolute(),
        default=Path("build/demo").absolute(),
        help="folder of state, logs and results (default build/demo)",
    )
    options = parser.parse_args(arguments)
    if options.width % MODEL_SIZE["heads"]:
        parser.error(f"--width: found {options.width}; must be a multiple of {MODEL_SIZE['heads']}")
    signal.signal(signal.SIGTERM, _stop)
    out, err = Console(), Console(stderr=True)
    try:
        demonstrate(options, out, err)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (WorkerError, ClientError) as error:
        err.print(f"demo: {error}", markup=False, highlight=False)
        return 1
    return 0
