"""The operator's choice of an executor, as text in a setting."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_PROCESSES = 1024


@dataclass(frozen=True)
class ExecutorChoice:
    """An operator's choice of an executor."""

    scheduler: str | None = None
    """Address of a Dask scheduler in Dask's form; None for processes on this machine."""
    processes: int | None = None
    """Number of processes; None for as many as searches may run."""


def parse_choice(text: str) -> ExecutorChoice:
    """Read ``processes``, ``processes:N``, ``dask://host:port`` or ``tls://host:port``; raises ValueError."""
    if text == "processes":
        return ExecutorChoice()
    if found := re.fullmatch(r"processes:([0-9]{1,9})", text):
        count = int(found[1])
        if not 1 <= count <= MOST_PROCESSES:
            raise ValueError(f"found {text!r}; processes must be from 1 to {MOST_PROCESSES}.")
        return ExecutorChoice(processes=count)
    if found := re.fullmatch(r"(dask|tls)://(\[[0-9A-Fa-f:.%]+\]|[^\s/:@\[\]]+):([0-9]{1,5})/?", text):
        scheme, host, port = found.groups()
        if 1 <= int(port) <= 65535:
            return ExecutorChoice(scheduler=f"{'tls' if scheme == 'tls' else 'tcp'}://{host}:{port}")
    raise ValueError(
        f"found {text!r}; must be processes, processes:N with the number of searches at the same time, "
        f"dask://HOST:PORT with the address of a Dask scheduler, or tls://HOST:PORT for one that speaks TLS."
    )
