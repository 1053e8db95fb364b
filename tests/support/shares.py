"""How the tests are divided among processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SHARES = {
    # They share a service, which has already loaded its planner.
    "browser": ("web/",),
    # They wait for agents, ranks and timeouts. If all processes wait at the same time, the cores are idle.
    "waiting": (
        "service/compute/test_processes.py",
        "worker/agent/",
        "worker/run/test_lost_ranks.py",
        "worker/run/test_run.py",
    ),
}
"""Files and folders that one process runs. Every other file is one share."""


def share_of(name: str) -> str:
    """The share of a file: the name of a share, or of the file."""
    return next((share for share, names in SHARES.items() if name.startswith(names)), name)


class Shares(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives one process all tests of a share."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid.partition("::")[0].removeprefix("tests/"))

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that killed its process; all tests behind it are run by others.

        xdist would run that test again, and would also assign shares without any test left. A process that is
        given only such a share never asks for more, and the run never ends.
        """
        shares = self.assigned_work.pop(node)
        waiting = (test for share in shares.values() for test, is_done in share.items() if not is_done)
        fatal: str | None = next(waiting, None)
        if fatal is None:
            return None
        for scope, share in shares.items():
            if fatal in share:
                share[fatal] = True
            if not all(share.values()):
                self.workqueue[scope] = share
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal
