"""The rendezvous of a run's ranks: each announces in a common store that it is there, or why it cannot start.

A rank that cannot run (no such model, another plan) would leave its peers waiting, so it publishes the reason
and all ranks end at once. A timeout names the ranks that did not arrive.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]  # as torch does

from zbv_worker.errors import InvalidRun
from zbv_worker.host.process import say
from zbv_worker.transport.torch_api import first_line

_POLL_SECONDS = 0.05
_REFUSE_SECONDS = 5.0
"""How long a rank that cannot start tries to reach the others."""
_LINGER_SECONDS = 1.0
_SERVER_SECONDS = 60.0
_OPTIONS = "--startup-timeout of `run` or --timeout of other commands"
_HOST = "meeting/host/{}"
SAY_SECONDS = 30.0
"""Time between two messages of a rank that waits for others to start."""
_NAMED = 16
"""The most ranks that a message names."""


def meet(rank: int, world_size: int, timeout: float, store: Store | None = None) -> Store:
    """Wait until every rank has arrived; returns the ranks' common store.

    Parameters
    ----------
    timeout
        Seconds.
    store
        A store to meet in, see :func:`part_of`; by default the one at MASTER_ADDR and MASTER_PORT.

    Raises
    ------
    TimeoutError
        Names the ranks that did not arrive.
    ConnectionError
        If a rank cannot start (with its reason), or the store is gone.
    InvalidRun
        If the environment does not contain the store's address.
    """
    started = said = time.monotonic()
    deadline = started + timeout
    if store is None:
        store = _connect(rank, world_size, timeout, is_host=_hosts(rank))
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
                if not absent:  # the last one arrived just now and is not counted yet
                    break
                reason = (
                    f"{named(absent)} of {world_size} did not start within {timeout:g} s. Start every rank "
                    f"within that time, or raise {_OPTIONS}; the logs of missing ranks may say why"
                )
                store.set("meeting/refusal", reason)
                _linger(rank)
                raise TimeoutError(reason)
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                absent = [other for other in range(world_size) if not store.check([_here(other)])]
                say(f"rank {rank}: waits for {named(absent)} to start ({said - started:.0f} s)")
            time.sleep(_POLL_SECONDS)
            count = store.add("meeting/count", 0)
    except RuntimeError as error:
        raise ConnectionError(f"the ranks' store at {_place()} is gone: {first_line(error)}") from error
    return store


def part_of(store: Store, rank: int) -> Store:
    """The part of a store that a rank uses next.

    Every rank gets another part each time, so the keys of one run do not disturb the next one in the same
    processes. All ranks must ask equally often.
    """
    return PrefixStore(f"zbv/{store.add(f'zbv/runs/{rank}', 1)}", store)


def lives_in_rank_0() -> bool:
    """Whether the store ends with rank 0."""
    return _hosts(0)


def ranks_on_this_host(store: Store) -> int:
    """The number of ranks on this host that met, in all containers."""
    return int(store.add(_HOST.format(host_identity()), 0))


def host_identity() -> str:
    """A text that all processes of one running kernel share."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def refuse(rank: int, world_size: int, reason: str) -> None:
    """Tell the other ranks, if they can be reached, why this rank cannot start."""
    if _hosts(rank):
        return  # the store would end with this process, before others could read it
    with suppress(TimeoutError, ConnectionError, InvalidRun, RuntimeError):
        store = _connect(rank, world_size, _REFUSE_SECONDS, is_host=False)
        store.set("meeting/refusal", f"rank {rank} cannot start: {reason.rstrip('.')}")


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, at most 16 by number."""
    shown = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def _connect(rank: int, world_size: int, timeout: float, *, is_host: bool) -> Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise InvalidRun(
            f"environment variables MASTER_ADDR and MASTER_PORT: found {host!r} and {port!r}; must be the "
            f"address of rank 0. Start the ranks with torchrun, or set both."
        )
    try:
        if is_host:
            _keep_server(host, int(port))
        store = _tcp_store(host, int(port), world_size, timeout, is_host=is_host)
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise ConnectionError(f"{_place()} is used by another program") from error
        raise TimeoutError(
            f"rank 0 did not start: no answer at {_place()} within {timeout:g} s. Start every rank "
            f"within that time, or raise {_OPTIONS}; its log may say why it did not start"
        ) from error
    # Under torchrun, one store may serve several attempts.
    return part_of(PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store), rank)


def _tcp_store(host: str, port: int, world_size: int | None, timeout: float, *, is_host: bool) -> TCPStore:
    return TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=is_host,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,  # `meet` waits, and can name the absent ones
        multi_tenant=True,
    )


@cache
def _keep_server(host: str, port: int) -> TCPStore:
    """Serve the store until this process ends.

    Otherwise the other ranks could meet a second time while the server of the first time is still ending.
    """
    return _tcp_store(host, port, None, _SERVER_SECONDS, is_host=True)


def _hosts(rank: int) -> bool:
    """Whether the store lives in this process; under torchrun it lives in torchrun's agent."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _linger(rank: int) -> None:
    """Keep a store in this process for a moment, so that the other ranks can read why the run ends."""
    if _hosts(rank):
        time.sleep(_LINGER_SECONDS)


def _here(rank: int) -> str:
    return f"meeting/here/{rank}"


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
