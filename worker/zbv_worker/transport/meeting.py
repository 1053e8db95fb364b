"""How the ranks of a run meet: each says in their common store that it is there, or why it cannot take part.

A rank that finds before the meeting that it cannot run (no such model, another plan) would leave its peers
waiting, so it says so, and they end at once. Who has not come in time is named.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]  # as torch does

from zbv_worker.errors import InvalidRun
from zbv_worker.transport.torch_errors import first_line

_POLL_SECONDS = 0.05
_FAREWELL_SECONDS = 5.0
"""How long a rank that cannot take part tries to tell the others."""
_LINGER_SECONDS = 1.0
_HOST = "meeting/host/{}"
_NAMED = 16
"""Ranks that a message names at most."""


def meet(rank: int, world_size: int, timeout: float) -> Store:
    """Wait until every rank is there; returns the ranks' common store.

    Parameters
    ----------
    timeout
        Seconds.

    Raises
    ------
    TimeoutError
        Naming the ranks that did not come.
    ConnectionError
        When a rank cannot take part, with its reason, or the store is gone.
    InvalidRun
        When the environment does not say where the store is.
    """
    deadline = time.monotonic() + timeout
    store = _connect(rank, world_size, timeout)
    try:
        store.add(_HOST.format(host_identity()), 1)
        store.set(_here(rank), "")
        count = store.add("meeting/count", 1)
        while count < world_size:
            if store.check(["meeting/refusal"]):
                _linger(rank)
                raise ConnectionError(store.get("meeting/refusal").decode())
            if time.monotonic() > deadline:
                absent = [other for other in range(world_size) if not store.check([_here(other)])]
                if not absent:  # the last one came just now, and is not counted yet
                    break
                reason = (
                    f"{named(absent)} of {world_size} did not come within {timeout:g} s. Start every rank "
                    f"within that time, or raise --timeout; their logs say why one did not start"
                )
                store.set("meeting/refusal", reason)
                _linger(rank)
                raise TimeoutError(reason)
            time.sleep(_POLL_SECONDS)
            count = store.add("meeting/count", 0)
    except RuntimeError as error:
        raise ConnectionError(f"{_place()}, which joins the ranks, is gone: {first_line(error)}") from error
    return store


def ranks_on_this_host(store: Store) -> int:
    """How many of the ranks that met run on this host, in containers too."""
    return int(store.add(_HOST.format(host_identity()), 0))


def host_identity() -> str:
    """The same for all processes of a running kernel."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def refuse(rank: int, world_size: int, reason: str) -> None:
    """Tell the others, as far as they can be reached, why this rank does not take part."""
    if _hosts(rank):
        return  # nobody can be told: the store would end with this process
    with suppress(TimeoutError, ConnectionError, InvalidRun, RuntimeError):
        store = _connect(rank, world_size, _FAREWELL_SECONDS)
        store.set("meeting/refusal", f"rank {rank} cannot take part: {reason.rstrip('.')}")


def named(ranks: Sequence[int]) -> str:
    """Some ranks in words."""
    shown = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def _connect(rank: int, world_size: int, timeout: float) -> Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise InvalidRun(
            f"environment variables MASTER_ADDR and MASTER_PORT: found {host!r} and {port!r}; must be where "
            f"rank 0 can be reached. Start the ranks with torchrun, or set both."
        )
    try:
        store = TCPStore(
            host_name=host,
            port=int(port),
            world_size=world_size,
            is_master=_hosts(rank),
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # they are waited for by name
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise ConnectionError(f"{_place()} is in use by another program") from error
        raise TimeoutError(
            f"rank 0 did not come: nobody answered at {_place()} within {timeout:g} s. Start every rank "
            f"within that time, or raise --timeout; its log says why it did not start"
        ) from error
    # Under torchrun one store may serve several attempts.
    return PrefixStore(f"zbv/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _hosts(rank: int) -> bool:
    """Whether this process is the one that the store lives in; under torchrun, its agent is."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _linger(rank: int) -> None:
    """Keep the store for a moment, if it lives in this process, so that the others read why the run ends."""
    if _hosts(rank):
        time.sleep(_LINGER_SECONDS)


def _here(rank: int) -> str:
    return f"meeting/here/{rank}"


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
