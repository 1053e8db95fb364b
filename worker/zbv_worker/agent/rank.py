"""One rank under an agent: ``python -m zbv_worker.agent.rank FOLDER``, started by torch elastic.

It does the same as ``zbv-worker run``, or runs a user's script. It also writes its progress, and the reason
if it fails.

A script runs in the rank's own process. It has torchrun's environment, and variables from which
:mod:`zbv_worker.pipeline.agent_run` finds the run's plan, and the folder for reports.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.errors import WorkerError, describe_error, print_error, status_of
from zbv_worker.failures.liveness import AgentWatch, Liveness
from zbv_worker.failures.progress import CurrentProgress, Progress, ProgressFile, described, failure_of
from zbv_worker.host.environment import script_environment
from zbv_worker.host.process import end_with_parent, say, threads_per_rank
from zbv_worker.host.state_files import NEXT_PLAN, SPEC, failure_file, progress_file, read_json, write_json

if TYPE_CHECKING:  # the first import of torch must follow the watch over the parent
    from zbv_worker.run.options import RunOptions

_PATIENCE = 0.8
"""Share of the service's patience after which ranks of a silent agent end: before the run is given away."""

_THREADS = "OMP_NUM_THREADS"
_WRONG_INPUT = 2


def main(folder: Path) -> int:
    """Run the rank that the environment names; returns the exit status."""
    end_with_parent()
    spec = read_json(folder / SPEC)
    liveness = Liveness()
    agent = AgentWatch(folder, _PATIENCE * spec["patience"], lambda silent: _report_silence(folder, silent))
    liveness.add(agent.look)
    if spec["work"].get("script") is not None:
        return run_script(spec, folder)
    from zbv_worker.failures.failures import OwnProcess
    from zbv_worker.run.run import run
    from zbv_worker.transport.world import World

    world, progress = World.from_environment(), CurrentProgress()

    def record(error: BaseException) -> None:
        failure = failure_of(world.rank, error, described(world.rank, error), progress.read())
        write_json(failure_file(folder, world.rank), failure)

    file = ProgressFile(progress_file(folder, world.rank), world.rank, progress)
    file.write()
    liveness.add(file.write)
    try:
        run(_options(spec, folder), world, OwnProcess(record), progress=progress, liveness=liveness)
    except Exception as error:  # before the ranks have met
        record(error)
        return print_error(error)
    finally:
        file.write()
    return 0


def _options(spec: Any, folder: Path) -> RunOptions:
    from zbv_worker.checkpoints.checkpoint import CheckpointOptions
    from zbv_worker.execution.plan_source import PlanSource
    from zbv_worker.model.spec import ModelSpec
    from zbv_worker.run.options import RunOptions, TrainingOptions

    work = spec["work"]
    model, options = work["model"], work["options"]
    checkpoint = options["checkpoint"]
    return RunOptions(
        sources=(PlanSource(spec["server"], work["plan_id"]),),
        model=ModelSpec(
            model["factory"], model["arguments"], model["seed"], allowed=tuple(spec["allowed_models"])
        ),
        steps=work["steps"],
        backend=options["backend"],
        timeout=options["timeout"],
        startup_timeout=options["startup_timeout"],
        threads=options["threads"],
        result_dir=folder / "results",
        training=TrainingOptions(
            replicas=options["data_parallel"],
            is_sharded=options["shard"],
            precision=options["precision"],
            is_compiled=options["compile"],
            has_main_gradients=options["main_gradients"],
            parts=options["accumulate"],
            clip_norm=options["clip_norm"],
            non_finite=options["non_finite"],
            evaluate_every=options["evaluate_every"],
            checkpoint=None
            if checkpoint is None
            else CheckpointOptions(
                Path(checkpoint["directory"]),
                checkpoint["every"],
                timeout=checkpoint["timeout"],
                is_synchronous=checkpoint["sync"],
                run=work["run_id"],
                attempt=work["generation"],
            ),
            next_plan=folder / NEXT_PLAN,
            trace_dir=folder,
        ),
    )


def _report_silence(folder: Path, seconds: float) -> None:
    rank = int(os.environ["RANK"])
    detail = (
        f"rank {rank} ended because its agent has been silent for {seconds:.0f} s (it was stopped, or "
        f"hangs); the service will soon give the run to other agents."
    )
    say(f"zbv-worker: {detail}")
    write_json(failure_file(folder, rank), {"kind": "agent-lost", "rank": rank, "detail": detail})


def run_script(spec: dict[str, Any], folder: Path) -> int:
    """Run the script of an agent's work; returns the exit status.

    If it fails, the reason is in the rank's log and in its file for the agent, which adds the end of the log
    if only that has the reason (``is_in_log``). Exit status 2, which argparse
    gives for wrong arguments, ends the run without a retry.
    """
    work, rank = spec["work"], int(os.environ["RANK"])
    path, arguments = work["script"]["path"], work["script"]["arguments"]
    os.environ.update(script_environment(spec["server"], work["plan_id"], folder))
    _share_cores(work["options"]["threads"])
    # Shows the agent that the script runs; a Pipeline replaces it with its own progress.
    write_json(progress_file(folder, rank), {"rank": rank, "step": None, "action": None})
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    name = Path(path).name
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = _status(end)
        if status:
            kind = "invalid" if status == _WRONG_INPUT else "error"
            detail = f"rank {rank}: {name} ended with exit status {status}"
            _record(folder, {"kind": kind, "rank": rank, "detail": detail, "is_in_log": True})
        return status
    except Exception as error:
        traceback.print_exception(error)
        detail = f"rank {rank}: {name}: {describe_error(error)}. Its log has the traceback."
        if isinstance(error, WorkerError):
            detail = str(error)  # names the rank, where that matters
        _record(folder, failure_of(rank, error, detail, Progress()))
        return status_of(error)
    return 0


def _share_cores(threads: int | None) -> None:
    """Set the compute threads, before torch is imported; by default the rank's share of the host's cores."""
    if threads is not None:
        os.environ[_THREADS] = str(threads)
    elif _THREADS not in os.environ:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.environ[_THREADS] = str(threads_per_rank(ranks, ranks))


def _status(end: SystemExit) -> int:
    """The exit status that Python gives a process that ends so."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    say(str(end.code))
    return 1


def _record(folder: Path, failure: dict[str, Any]) -> None:
    write_json(failure_file(folder, failure["rank"]), failure)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
