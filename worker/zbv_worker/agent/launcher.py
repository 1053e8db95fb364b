"""Runs one generation of a node's ranks by torch elastic: ``python -m zbv_worker.agent.launcher FOLDER``.

It is a separate process, so that the agent imports no torch. The world is static and nothing is restarted
here: the next attempt is a new generation, with a new name and thus without old keys in its store.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from zbv_worker.host.process import PARENT_VARIABLE, end_with_parent
from zbv_worker.host.state_files import OUTCOME, SPEC, read_json, write_json

_MEETING_SECONDS = 120
"""How long launchers wait for the launcher of node 0; not all import torch equally fast. If node 0 fails, the
service ends this launcher within seconds. The ranks themselves wait for each other for ``--timeout``.
"""
_GRACE_SECONDS = "5"
_STOPPED = 143


def main(folder: Path) -> int:
    """Run the ranks until they end and write their outcome; returns the exit status."""
    end_with_parent()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the ranks' parent is this process
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_SECONDS)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    entry = ("-u", "-m", "zbv_worker.agent.rank", str(folder))
    try:
        elastic_launch(_config(read_json(folder / SPEC), folder), sys.executable)(*entry)
    except ChildFailedError as error:
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_json(folder / OUTCOME, {"failed": failed})
        return 1
    except SignalException:
        return _STOPPED
    except Exception as error:
        write_json(folder / OUTCOME, {"failed": {}, "detail": f"{type(error).__name__}: {error}"})
        raise
    write_json(folder / OUTCOME, {"failed": {}})
    return 0


def _config(spec: dict[str, Any], folder: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    work = spec["work"]
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    return LaunchConfig(
        min_nodes=work["nodes"],
        max_nodes=work["nodes"],
        nproc_per_node=work["ranks_per_node"],
        run_id=f"{work['run_id']}-{work['generation']}",
        rdzv_backend="static",
        rdzv_endpoint=work["rendezvous"],
        rdzv_configs={"rank": work["node_rank"], "timeout": _MEETING_SECONDS},
        local_addr=spec["address"],
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
