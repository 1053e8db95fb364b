"""One rank under an agent: ``python -m zbv_worker.agent.rank FOLDER``, started by torch elastic.

It does the same as ``zbv-worker run``, or runs a user's script. It also writes its progress, and the reason
if it fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_worker.errors import print_error
from zbv_worker.failures.liveness import AgentWatch, Liveness
from zbv_worker.failures.progress import CurrentProgress, ProgressFile, described, failure_of
from zbv_worker.host.process import end_with_parent, say
from zbv_worker.host.state_files import NEXT_PLAN, SPEC, failure_file, progress_file, read_json, write_json

if TYPE_CHECKING:  # the first import of torch must follow the watch over the parent
    from zbv_worker.training.options import RunOptions

_PATIENCE = 0.8
"""Share of the service's patience after which ranks of a silent agent end: before the run is given away."""


def main(folder: Path) -> int:
    """Run the rank that the environment names; returns the exit status."""
    end_with_parent()
    spec = read_json(folder / SPEC)
    liveness = Liveness()
    agent = AgentWatch(folder, _PATIENCE * spec["patience"], lambda silent: _report_silence(folder, silent))
    liveness.add(agent.look)
    if spec["work"].get("script") is not None:
        from zbv_worker.agent.script import run_script

        return run_script(spec, folder)
    from zbv_worker.failures.failures import OwnProcess
    from zbv_worker.training.run import run
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
    from zbv_worker.execution.plan_source import PlanSource
    from zbv_worker.model.spec import ModelSpec
    from zbv_worker.training.checkpoint import CheckpointOptions
    from zbv_worker.training.options import DEFAULT_STARTUP_TIMEOUT, RunOptions, TrainingOptions

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
        # Older services do not send every option.
        startup_timeout=options.get("startup_timeout", DEFAULT_STARTUP_TIMEOUT),
        threads=options["threads"],
        result_dir=folder / "results",
        training=TrainingOptions(
            replicas=options["data_parallel"],
            is_sharded=options["shard"],
            precision=options["precision"],
            is_compiled=options.get("compile", False),
            has_main_gradients=options.get("main_gradients", True),
            parts=options.get("accumulate", 1),
            clip_norm=options["clip_norm"],
            non_finite=options.get("non_finite", "fail"),
            evaluate_every=options["evaluate_every"],
            checkpoint=None
            if checkpoint is None
            else CheckpointOptions(
                Path(checkpoint["directory"]),
                checkpoint["every"],
                timeout=checkpoint["timeout"],
                is_synchronous=checkpoint.get("sync", False),
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
