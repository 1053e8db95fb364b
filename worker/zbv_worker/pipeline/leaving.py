"""What a pipeline does when it ends without :meth:`Pipeline.close`.

The functions do not refer to the pipeline, so that it can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbv_worker.pipeline.agent_run import RunReports
from zbv_worker.pipeline.checkpoints import PipelineCheckpoints
from zbv_worker.pipeline.data import SharedData
from zbv_worker.pipeline.failures import Failures
from zbv_worker.pipeline.rank import PipelineRank

_LEAVE_SECONDS = 10.0
"""How long it waits for its peers to receive what it sent."""


def leave(
    own: PipelineRank,
    shared: SharedData | None,
    reports: RunReports | None,
    saving: Sequence[PipelineCheckpoints],
    failures: Failures,
) -> None:
    """Complete this rank's checkpoints and reports, and let the peers receive what the rank has sent."""
    if failures.has_failed:
        return
    failures.stop_watching()
    for checkpoints in saving:
        checkpoints.leave()
    if shared is not None:
        shared.leave(_LEAVE_SECONDS)
    if reports is not None:
        reports.finish()
    own.leave(_LEAVE_SECONDS)
    failures.close_transport()


def give_up(saving: Sequence[PipelineCheckpoints], own: PipelineRank) -> None:
    """Give up what is being saved, and release the user's modules: the pipeline has failed."""
    for checkpoints in saving:
        checkpoints.give_up()
    own.release()
