"""What replicas of the pipeline share and do not share: means over them, and random numbers of each."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zbv_worker.transport.channels import Transport


def mean_over_replicas(
    transport: Transport, value: Tensor | None, timeout: float, device: torch.device
) -> Tensor | None:
    """The mean of a scalar over the replicas of a position; None if they have none.

    Collective even without a number, so that no replica ends a step before all have begun it (see
    :mod:`zbv_worker.run.plan_change`).
    """
    replicas = transport.layout.replicas
    if replicas == 1:
        return value
    total = (
        torch.zeros(1, dtype=torch.float64, device=device) if value is None else value.reshape(1) / replicas
    )
    transport.sum_over_replicas(total).wait(timeout)
    return None if value is None else total[0]


def seed_generators(seed: int, transport: Transport) -> None:
    """Give every position and replica its own random numbers: replicas with equal dropout would learn less.

    The inner ranks of a replica get equal ones, or dropout would make their common activations differ.
    Called after the stages are built, because the model may have seeded the same generators.
    """
    digest = _digest(seed, transport)
    torch.manual_seed(int.from_bytes(digest[:7]))
    random.seed(digest)


@contextmanager
def numbers_of_place(transport: Transport, device: torch.device, *, advances: bool) -> Iterator[None]:
    """A context in which torch's random numbers are those of this rank's position and replica.

    They follow from the caller's generator, so ``torch.manual_seed`` and a restored state count. After the
    context, the caller has the state of before: ranks that were seeded alike still shuffle data alike.

    Parameters
    ----------
    advances
        Whether the caller's generator then advances by one number, so that the next context has other ones.
    """
    cuda = device if device.type == "cuda" else None
    before = torch.get_rng_state()
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    state = torch.get_rng_state() if advances else before
    of_device = None if cuda is None else torch.cuda.get_rng_state(cuda)
    seed = int.from_bytes(_digest(drawn, transport)[:7])
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)


def _digest(seed: int, transport: Transport) -> bytes:
    place = transport.pp_rank * transport.layout.replicas + transport.replica
    return hashlib.sha256(f"{seed}/{place}".encode()).digest()
