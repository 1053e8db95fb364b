"""An independent check of action lists with communication for PyTorch's pipelining runtime.

That runtime checks little: if receives or losses are in a wrong order, or gradients are not divided, it
computes wrong results without an error. Every rule here prevents such a fault. Like the verifier, this module
shares no code with the export that makes the lists.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem

_ACTION = re.compile(
    r"(?P<stage>0|[1-9]\d{0,8})"
    r"(?:(?P<letter>[FIWB]|SEND_F|RECV_F|SEND_B|RECV_B)(?P<microbatch>0|[1-9]\d{0,8})"
    r"|(?P<once>UNSHARD|REDUCE_GRAD|RESHARD))"
)

Lists = Sequence[Sequence[str]]


class _Transfer(NamedTuple):
    """One tensor that is sent: its kind, and the stage and microbatch that produce it."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.kind}{self.microbatch}"

    @property
    def target(self) -> int:
        """The stage that uses the tensor."""
        return self.stage + (1 if self.kind == "F" else -1)


class _Step(NamedTuple):
    """One entry of a rank's list; ``transfer`` is None unless the entry sends or receives.

    The microbatch is -1 for entries without one.
    """

    text: str
    stage: int
    name: str
    microbatch: int
    transfer: _Transfer | None

    @property
    def is_compute(self) -> bool:
        return len(self.name) == 1


def verify_comms(problem: Problem, orders: Orders, lists: Lists) -> None:
    """Check that lists with communication execute a plan's orders, and are safe for the runtime.

    Parameters
    ----------
    orders
        Orders that :func:`zbv_solver.verify.verifier.verify_orders` accepts, with the microbatches of
        ``lists``.
    lists
        One list per rank, in PyTorch's notation: ``0UNSHARD``, ``0F0``, ``0SEND_F0``, ….

    Raises
    ------
    InvalidPlan
        With the entry, the rank, and the broken rule.
    """
    verify_transfers(problem, orders, lists)
    verify_gradients(problem, lists)


def verify_transfers(problem: Problem, orders: Orders, lists: Lists) -> None:
    """Check only that lists execute a plan's orders, and that every tensor arrives where it is used.

    Raises :class:`InvalidPlan` as :func:`verify_comms` does.
    """
    if len(lists) != problem.pp_degree:
        raise InvalidPlan(f"found lists of {len(lists)} ranks; the plan has {problem.pp_degree}.")
    ranks = _steps(lists)
    _check_compute(orders, ranks)
    _check_ends(problem, ranks)
    _check_pairs(problem, ranks)
    _check_progress(problem, ranks)


def verify_gradients(problem: Problem, lists: Lists) -> None:
    """Check only what the runtime needs for right gradients: the order of losses, and gradients' reduction.

    Lists without any communication get their reductions from the runtime. Raises :class:`InvalidPlan`.
    """
    ranks = _steps(lists)
    _check_losses(problem, ranks)
    if not all(step.is_compute for steps in ranks for step in steps):
        _check_once_per_stage(problem, ranks)


def _steps(lists: Lists) -> list[list[_Step]]:
    return [[_parse(text, rank) for text in texts] for rank, texts in enumerate(lists)]


def _parse(text: str, rank: int) -> _Step:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise InvalidPlan(
            f"rank {rank}: found {text!r}; an entry is a stage, an action and a microbatch and nothing after "
            f"it, as in 0F3, 1RECV_F0 or 0REDUCE_GRAD. The runtime would ignore what follows."
        )
    stage = int(match["stage"])
    if match["once"]:
        return _Step(text, stage, match["once"], -1, None)
    name, microbatch = match["letter"], int(match["microbatch"])
    transfer = None
    if len(name) > 1:
        source = stage + {"SEND_F": 0, "SEND_B": 0, "RECV_F": -1, "RECV_B": 1}[name]
        transfer = _Transfer(name[-1], source, microbatch)
    return _Step(text, stage, name, microbatch, transfer)


def _check_compute(orders: Orders, ranks: Sequence[Sequence[_Step]]) -> None:
    """Every list must have the actions of the plan in its order, each exactly once."""
    for rank, steps in enumerate(ranks):
        found = [step.text for step in steps if step.is_compute]
        pairs = zip_longest(found, orders.text(rank), fillvalue="the end")
        for at, (here, there) in enumerate(pairs):
            if here != there:
                raise InvalidPlan(f"rank {rank}: action {at} is {here}; the plan has {there} there.")


def _check_losses(problem: Problem, ranks: Sequence[Sequence[_Step]]) -> None:
    """Losses must come in microbatch order: the runtime appends them and looks them up by microbatch."""
    last = problem.n_stages - 1
    ran = [s.microbatch for steps in ranks for s in steps if (s.stage, s.name) == (last, "F")]
    wrong = next((k for k, microbatch in enumerate(ran) if microbatch != k), None)
    if wrong is not None:
        raise InvalidPlan(
            f"the last stage runs {last}F{ran[wrong]} as its forward number {wrong}; its forwards must run "
            f"in the order 0, 1, 2, …, because the runtime looks losses up by that number: gradients would "
            f"be wrong without an error. Relabel the microbatches, as `zbv export --format torch-csv` does."
        )


def _check_once_per_stage(problem: Problem, ranks: Sequence[Sequence[_Step]]) -> None:
    """Every stage must be unsharded before its first action, then reduced and resharded after its last."""
    for stage in range(problem.n_stages):
        rank = problem.placement.rank_of[stage]
        names = [step.name for step in ranks[rank] if step.stage == stage and step.transfer is None]
        expected = ["UNSHARD", *[name for name in names if len(name) == 1], "REDUCE_GRAD", "RESHARD"]
        if names != expected:
            raise InvalidPlan(
                f"rank {rank}: stage {stage} must have one {stage}UNSHARD before its first action, and one "
                f"{stage}REDUCE_GRAD and {stage}RESHARD after its last, in that order; found {_found(names)}"
                f". REDUCE_GRAD divides the gradients by the number of microbatches: without it they would "
                f"be too large and no error would say so."
            )


def _found(names: Sequence[str]) -> str:
    """The positions of entries without microbatch among a stage's entries."""
    said = [f"{name} at {at}" for at, name in enumerate(names) if len(name) > 1]
    return f"{', '.join(said) or 'none'} of {len(names)}"


def _check_ends(problem: Problem, ranks: Sequence[Sequence[_Step]]) -> None:
    """Every tensor must be sent once, after it is produced, and received once, before it is used."""
    for rank, steps in enumerate(ranks):
        done: set[str] = set()
        for step in steps:
            if step.text in done:
                raise InvalidPlan(f"rank {rank}: {step.text} comes twice; every entry comes once.")
            for needed in _needs(problem, step):
                if not done.intersection(needed):
                    raise InvalidPlan(
                        f"rank {rank}: {step.text} comes before {' or '.join(needed)}, which it needs."
                    )
            done.add(step.text)
            if step.transfer is not None and not _crosses(problem, rank, step.stage, step.transfer):
                raise InvalidPlan(
                    f"rank {rank}: found {step.text}; that tensor does not cross ranks there, and the "
                    f"runtime hands over inside a rank by itself."
                )
    sent = {step.transfer for steps in ranks for step in steps if step.name.startswith("SEND")}
    received = {step.transfer for steps in ranks for step in steps if step.name.startswith("RECV")}
    for one_sided in sorted(filter(None, sent ^ received)):
        raise InvalidPlan(f"{one_sided} has only one end; every send has its receive on the other rank.")


def _needs(problem: Problem, step: _Step) -> Iterator[tuple[str, ...]]:
    """For each input that an entry needs on its rank, the entries that can provide it."""
    stage, name, j = step.stage, step.name, step.microbatch
    rank_of = problem.placement.rank_of
    if name == "SEND_F":
        yield (f"{stage}F{j}",)
    elif name == "SEND_B":
        yield (f"{stage}I{j}", f"{stage}B{j}")
    elif name == "F" and stage > 0:
        local = rank_of[stage - 1] == rank_of[stage]
        yield (f"{stage - 1}F{j}",) if local else (f"{stage}RECV_F{j}",)
    elif name in ("I", "B") and stage < problem.n_stages - 1:
        local = rank_of[stage + 1] == rank_of[stage]
        yield (f"{stage + 1}I{j}", f"{stage + 1}B{j}") if local else (f"{stage}RECV_B{j}",)


def _crosses(problem: Problem, rank: int, stage: int, transfer: _Transfer) -> bool:
    """Whether the plan has this transfer at this end: a stage, and its rank."""
    source, target, rank_of = transfer.stage, transfer.target, problem.placement.rank_of
    if min(source, target) < 0 or max(source, target) >= problem.n_stages:
        return False
    return rank_of[stage] == rank and rank_of[source] != rank_of[target]


def _peer_of(problem: Problem, rank: int, transfer: _Transfer) -> int:
    source, target = (problem.placement.rank_of[stage] for stage in (transfer.stage, transfer.target))
    return target if source == rank else source


def _check_pairs(problem: Problem, ranks: Sequence[Sequence[_Step]]) -> None:
    """Two ranks must list the transfers between them in the same order, which is how messages are matched."""
    between: dict[tuple[int, int], list[_Transfer]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        for step in steps:
            if step.transfer is not None:
                between[rank, _peer_of(problem, rank, step.transfer)].append(step.transfer)
    for (rank, peer), transfers in sorted(between.items()):
        theirs = between[peer, rank]
        at = next((k for k, (a, b) in enumerate(zip(transfers, theirs, strict=False)) if a != b), None)
        if rank < peer and at is not None:
            raise InvalidPlan(
                f"ranks {rank} and {peer}: transfer {at} between them is {transfers[at]} on one and "
                f"{theirs[at]} on the other; both must list their transfers in one order. Messages of two "
                f"ranks are matched by their order: tensors would be mistaken for each other without an "
                f"error. Do not reorder receives (defer_pp_recv=True does)."
            )


def _check_progress(problem: Problem, ranks: Sequence[Sequence[_Step]]) -> None:
    """No rank may wait forever, even if a send blocks until its receive is posted."""
    at = [0] * len(ranks)
    woken = list(range(len(ranks)))
    while woken:
        rank = woken.pop()
        while at[rank] < len(ranks[rank]):
            transfer = ranks[rank][at[rank]].transfer
            if transfer is not None:
                peer = _peer_of(problem, rank, transfer)
                # A send and its receive complete together, as if the send blocked. Then the peer may go on,
                # so it is visited again.
                if at[peer] == len(ranks[peer]) or ranks[peer][at[peer]].transfer != transfer:
                    break
                at[peer] += 1
                woken.append(peer)
            at[rank] += 1
    for rank, steps in enumerate(ranks):
        if at[rank] < len(steps):
            raise InvalidPlan(
                f"rank {rank} can wait forever at {steps[at[rank]].text}: the ranks' sends and receives "
                f"wait for each other in a cycle. List them in the order of one execution, as `zbv export "
                f"--format torch-comms-csv` does."
            )
