"""Checks that all ranks were started alike, before the first step and again at every change of plan.

Two ranks with different plans would hang or silently compute garbage. So the ranks exchange statements of
what they were started with, and if these differ, every rank fails with the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydantic import TypeAdapter
from zbv_solver.plans.channels import Channel

from zbv_worker.errors import ChannelTimeout, Disagreement
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.channels import ChannelKey, Transport, key_of
from zbv_worker.transport.rendezvous import named
from zbv_worker.transport.world import Layout


@dataclass(frozen=True)
class Statement:
    """What one rank was started with."""

    plan_id: str
    pp_rank: int
    pp_degree: int
    world_size: int
    model: str
    """Fingerprint of the model, its arguments and its number of stages."""
    backend: str
    steps: int
    channels: tuple[Channel, ...]
    traced: bool = False
    """Whether the ranks will collect their traces."""
    replicas: int = 1
    """Number of pipelines in the world."""
    options: tuple[tuple[str, str], ...] = ()
    """Names and values of everything else that must be equal on all ranks."""


_KEYWORDS = TypeAdapter(list[Keywords])
_STATEMENTS = TypeAdapter(list[Statement])

_PER_RANK = ("pp_rank", "channels", "options")
"""The fields that may differ between ranks; of the options, each one must be equal."""


def agree(transport: Transport, mine: Statement, timeout: float) -> tuple[ChannelKey, ...]:
    """Exchange statements; returns all channels of the pipeline, identical on all ranks.

    Raises
    ------
    Disagreement
        Names what differs and on which ranks. Every rank raises it.
    ChannelTimeout
        If a rank does not take part.
    """
    try:
        said = transport.gather(_STATEMENTS.dump_python([mine], mode="json")[0], timeout)
    except TimeoutError as error:
        raise ChannelTimeout(
            f"rank {transport.rank} waited {timeout:g} s for all {transport.world_size} ranks to agree on "
            f"the plan ({error}). Start every rank within that time, or raise --timeout."
        ) from error
    statements = _STATEMENTS.validate_python(said)
    _check_common(statements)
    _check_ranks(statements, transport.layout)
    _check_channels(statements, transport.layout)
    return tuple(sorted({key_of(channel) for statement in statements for channel in statement.channels}))


def agree_on_keywords(transport: Transport, mine: Keywords, timeout: float) -> Keywords:
    """The keyword arguments that layers of the whole model take. Collective over all ranks.

    Raises
    ------
    TimeoutError
        If a rank does not take part.
    """
    return Keywords.union(keywords_by_rank(transport, mine, timeout))


def keywords_by_rank(transport: Transport, mine: Keywords, timeout: float) -> list[Keywords]:
    """Like :func:`agree_on_keywords`, for each rank."""
    said = transport.gather(_KEYWORDS.dump_python([mine], mode="json")[0], timeout)
    return _KEYWORDS.validate_python(said)


def _check_common(statements: Sequence[Statement]) -> None:
    """Check what must be equal on all ranks."""
    common = [field.name for field in fields(Statement) if field.name not in _PER_RANK]
    for name in (*common, *dict(statements[0].options)):
        values: dict[object, list[int]] = {}
        for rank, statement in enumerate(statements):
            value = getattr(statement, name) if name in common else dict(statement.options).get(name)
            values.setdefault(value, []).append(rank)
        if len(values) > 1:
            # The largest group first: the others are more likely the ones started wrongly.
            groups = sorted(values.items(), key=lambda item: (-len(item[1]), item[1]))
            found = "; ".join(f"{named(ranks)}: {_shown(value)}" for value, ranks in groups)
            raise Disagreement(
                f"the ranks differ in {name.replace('_', ' ')} ({found}). Start all of them with the same "
                f"plan, model and options; nothing was run."
            )


def _check_ranks(statements: Sequence[Statement], layout: Layout) -> None:
    world, degree, columns = layout.world_size, statements[0].pp_degree, layout.columns
    if world != degree * columns:
        times = f" and there are {columns} pipelines" if columns > 1 else ""
        raise Disagreement(
            f"found {world} ranks; the plan is for {degree}{times}. Start {degree * columns} ranks, or plan "
            f"for {layout.pp_degree}."
        )
    for rank, statement in enumerate(statements):
        if statement.pp_rank != layout.pp_rank(rank):
            raise Disagreement(
                f"rank {rank} has the action list of rank {statement.pp_rank}, but needs the one of rank "
                f"{layout.pp_rank(rank)}."
            )


def _check_channels(statements: Sequence[Statement], layout: Layout) -> None:
    """Both ends of a channel must expect the same tensors in the same order."""
    for rank, statement in enumerate(statements):
        for channel in statement.channels:
            peer = channel.receiver if channel.sender == statement.pp_rank else channel.sender
            if channel not in statements[layout.global_rank(peer, layout.column(rank))].channels:
                raise Disagreement(
                    f"ranks {channel.sender} and {channel.receiver} expect different tensors on channel "
                    f"{key_of(channel)}. Fetch the plan again from the service that made it."
                )


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else f"{text[:12]}…"
