"""Walks one rank's action list: waits for an action's input, runs it on its stage, passes its output on.

The executor never decides what comes next; the plan does. It never waits for a send, so a rank waits only
where the plan needs a tensor of another rank. On a GPU the host only queues work: it stays a few actions
ahead of the device, across the ends of steps too, and learns a step's times and losses while it launches the
next step (:mod:`zbv_worker.execution.timeline`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from zbv_solver.plans.channels import Channel

from zbv_worker.errors import naming_errors
from zbv_worker.execution.binding import (
    Batches,
    Binding,
    Bound,
    BoundCopy,
    BoundPair,
    Computation,
    Pinning,
    evaluation_of,
    keywords_of,
    not_received,
    overdue,
    send_failed,
)
from zbv_worker.execution.copies import Copies
from zbv_worker.execution.fetch_ahead import FetchAhead, order_of_need
from zbv_worker.execution.pairs import Pairs
from zbv_worker.execution.rank_plan import RankPlan, activations, forwards, lower
from zbv_worker.execution.timeline import (
    CudaTimeline,
    DeviceWaits,
    HostTimeline,
    Launched,
    Overdue,
    Patience,
    Queued,
    QueuedWork,
    Record,
    StepResult,
    Timeline,
)
from zbv_worker.execution.turns import Overlap
from zbv_worker.failures.progress import CurrentProgress, Place, Progress, attach_progress
from zbv_worker.model.protocol import Evaluated
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.channels import ChannelKey, Transport, key_of
from zbv_worker.transport.endpoints import Crossings, Inbox, Outbox
from zbv_worker.values.structure import Structure, bytes_of

DEFAULT_LOOK_AHEAD = 3
DEFAULT_STARTUP_TIMEOUT = 1800.0
"""Seconds. Compiling the stages of a large model takes minutes, and nodes rarely start at the same moment."""

Walk = Literal["step", "evaluation"]


@dataclass(frozen=True)
class ExecutorOptions:
    """How an executor runs."""

    look_ahead: int = DEFAULT_LOOK_AHEAD
    """Receives kept posted ahead per channel."""
    progress: CurrentProgress | None = None
    """Updated with every action."""
    on_stage_done: Callable[[int], None] | None = None
    """Called with a stage's index in each step, right after the last action that adds to its gradients."""
    timeline: Timeline | None = None
    """Records when actions happen; by default the timeline of the device."""
    startup_timeout: float | None = None
    """Seconds to wait for any one tensor in the first steps, which may compile and connect; the ordinary
    timeout if that is longer, or if None."""
    startup_steps: int = 1
    """The number of first steps for which that holds."""
    fetch_ahead: int = 0
    """Microbatches fetched ahead on a thread (:mod:`zbv_worker.execution.fetch_ahead`); 0 for none."""
    last_step: int | None = None
    """The last step that may be fetched ahead; None for the current one."""
    parts: int = 1
    """How often a step runs the plan; see :meth:`Executor.launch`."""
    keywords: Keywords | None = None
    """Those that layers of the whole model take, for checks of microbatches
    (:func:`zbv_worker.execution.agreement.agree_on_keywords`); None if unknown."""
    stated: Sequence[Structure] = ()
    """The structures of what crosses boundaries in a step, by microbatch, if the model states them; else
    empty."""
    meet: Callable[[int], None] | None = None
    """Called with a peer's global rank before the first of its tensors is taken in a step or evaluation."""
    overlap: Overlap | None = None
    """Runs the two actions of a pair; by default :func:`zbv_worker.execution.turns.in_turns`."""


class Executor:
    """One rank of a pipeline.

    Parameters
    ----------
    stages
        The rank's stages by index, with the plan's number of microbatches.
    timeout
        Seconds to wait for any one tensor.

    Raises
    ------
    InvalidRun
        If the plan's lists and channels contradict each other.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Computation],
        batches: Batches,
        transport: Transport,
        *,
        device: torch.device,
        timeout: float,
        options: ExecutorOptions | None = None,
    ):
        options = options or ExecutorOptions()
        self._rank = transport.rank
        copies = transport.layout.copies_of(transport.rank)
        self._siblings = tuple(rank for rank in copies if rank != transport.rank)
        self._transport, self._device, self._options = transport, device, options
        self._stages = stages
        self._batches = batches
        self._check = transport.check
        self._timeout = timeout
        self._later_patience = self._patience = Patience(timeout)
        if options.startup_timeout is not None and options.startup_timeout > timeout:
            self._patience = Patience(options.startup_timeout, "--startup-timeout")
        self._starting = options.startup_steps
        self._untried: set[Walk] = {"step", "evaluation"}
        self._pinned = Pinning(device)
        self._parts = options.parts
        self._walks = 0
        self._before: Launched | None = None
        self._progress = options.progress or CurrentProgress()
        self._on_stage_done = options.on_stage_done
        self._timeline = options.timeline or (
            CudaTimeline(device) if device.type == "cuda" else HostTimeline()
        )
        limit = self._timeline.run_ahead
        self._queued = (
            None if limit is None else Queued(limit, self._check_queued, self._timeline.clock, self._progress)
        )
        self._pairs: Pairs | None = None
        self.copies: Copies | None = None
        self._known = options.keywords
        if self._known is None and set(stages) == set(range(plan.placement.n_stages)):
            self._known = keywords_of(stages.values())
        self._crossings = Crossings(plan.microbatches, options.stated)
        # Separately, because an evaluation may have other data, and nothing requires a gradient.
        self._evaluated = Crossings(plan.microbatches)
        self._bind(plan)
        if plan.features:
            self.expect(None)
            self.expect(None, evaluation=True)

    def follow(self, plan: RankPlan, stated: Sequence[Structure]) -> None:
        """Call between steps to run another plan of the same stages, channels and number of microbatches.

        Parameters
        ----------
        stated
            As in :class:`ExecutorOptions`, for the plan's microbatches.
        """
        if self._ahead is not None:
            self._ahead.close()
        if stated:
            self._crossings = Crossings(plan.microbatches, stated)
        self._bind(plan)

    def _bind(self, plan: RankPlan) -> None:
        """Look up everything that is the same in every step of a plan."""
        self.plan, transport, device, options = plan, self._transport, self._device, self._options
        column, layout = transport.column, transport.layout
        program = lower(plan, lambda position: layout.global_rank(position, column))

        def inboxes(channels: Iterable[Channel], crossings: Crossings) -> dict[ChannelKey, Inbox]:
            meet = options.meet
            return {
                key_of(c): Inbox(
                    transport,
                    c,
                    crossings,
                    options.look_ahead,
                    None if meet is None else partial(meet, layout.global_rank(c.sender, column)),
                )
                for c in channels
            }

        def outboxes(crossings: Crossings) -> dict[ChannelKey, Outbox]:
            outgoing = [channel for channel in plan.channels if channel.sender == plan.rank]
            return {key_of(c): Outbox(transport, c, crossings, device) for c in outgoing}

        if plan.copies and self.copies is None:
            self.copies = Copies(self._stages, device, self._timeline)
        incoming = [channel for channel in plan.channels if channel.receiver == plan.rank]
        self._binding = Binding(
            rank=self._rank,
            last_stage=plan.placement.n_stages - 1,
            stages=self._stages,
            inboxes=inboxes(incoming, self._crossings),
            outboxes=outboxes(self._crossings),
            device=device,
            pinned=self._pinned,
            keywords=self._known,
            keeps=self.copies,
        )
        self._program = self._binding.of_step(program, plan.copies)
        if plan.pairs and self._pairs is None:
            self._pairs = Pairs(
                self._stages,
                device,
                self._timeline,
                self._rank,
                progress=self._progress,
                queued=self._queued,
                check=self._check,
                done=self._on_stage_done,
                overlap=options.overlap,
            )
        self._evaluation = replace(
            self._binding,
            inboxes=inboxes(map(activations, incoming), self._evaluated),
            outboxes=outboxes(self._evaluated),
        )
        self._forwards = forwards(program)
        order = order_of_need(program, self._binding.data_stages)
        self._ahead: FetchAhead | None = None
        if options.fetch_ahead and order:
            load, timeout = self._batches.microbatch, self._timeout
            self._ahead = FetchAhead(
                load, order, options.fetch_ahead, self._pinned, timeout, options.last_step
            )

    @property
    def boundaries(self) -> dict[int, Structure]:
        """What crosses the boundaries to other ranks, as far as it is known; the largest, if it varies."""
        carried = {transfer.boundary for channel in self.plan.channels for transfer in channel.transfers}
        return self._crossings.largest(sorted(carried))

    def expect(self, shapes: Sequence[int] | None, *, evaluation: bool = False) -> None:
        """Call before a step or evaluation if its data may have other shapes, alike on all ranks.

        Otherwise all microbatches must be equal if the plan has no features, and every activation has a
        header if it has.

        Parameters
        ----------
        shapes
            By microbatch, numbers that stand for the shapes of its data; None if they are not known on all
            ranks.
        """
        crossings = self._evaluated if evaluation else self._crossings
        if shapes != crossings.shapes and crossings.expect(shapes):
            self._untried.add("evaluation" if evaluation else "step")

    @property
    def is_late(self) -> bool:
        """Whether a step's results are known only while the next step is launched."""
        return self._queued is not None

    def step(self, step: int) -> StepResult:
        """Run every action of the plan once; gradients accumulate into the stages' parameters.

        Raises
        ------
        ChannelTimeout, PeerLost
            If a peer does not deliver. The transport is unusable afterwards.
        """
        return self.launch(step).result()

    def launch(self, step: int, part: int = 0) -> Launched:
        """Like :meth:`step`, but on a GPU do not wait for the end of the step, only of the step before.

        Parameters
        ----------
        part
            Which run of the plan this is in a step with several (``parts``). Its microbatches are asked for
            with the number of runs before it, ``step * parts + part``, in place of the step.
        """
        number = step * self._parts + part
        before, self._before = self._before, None
        if before is not None:
            before.end()
        ahead, binding = self._ahead, self._binding
        binding.state.begin(number, self._batches.microbatch if ahead is None else ahead.begin(number))
        with self._trying("step") if "step" in self._untried else nullcontext():
            self._crossings.begin()
            if self.copies is not None:
                self.copies.begin()
            for inbox in binding.inboxes.values():
                inbox.begin(self._patience.seconds)
            launched = self._walk(self._program, binding, step)
        self._starting -= 1
        if self._starting <= 0:
            self._patience = self._later_patience
        if before is not None:
            before.result()
        if self._queued is not None:
            self._before = launched
        return launched

    def close(self) -> None:
        """Stop the threads that fetch data and copy."""
        if self._ahead is not None:
            self._ahead.abandon()
        if self.copies is not None:
            self.copies.close()

    def evaluate(self, step: int) -> dict[int, float]:
        """Run only the plan's forwards; returns losses by microbatch on the rank of the last stage.

        Collective over the pipeline, between steps; changes no state of the stages. Modules are in evaluation
        mode, nothing is kept for a backward, and activations are sent in the same order as in a step. Without
        backwards, nothing delays the first ranks: up to one output per microbatch waits at its sender.

        Parameters
        ----------
        step
            Passed to the model's ``evaluation_microbatch``, or to ``microbatch`` if the model has no such
            method.

        Raises
        ------
        ChannelTimeout, PeerLost
            As :meth:`step`.
        InvalidRun
            If a stage cannot be evaluated.
        """
        batches, binding = self._batches, self._evaluation
        if self._ahead is not None:
            self._ahead.close()  # so that the model's methods never run at the same time
        if self._before is not None:
            self._before.result()
        load = batches.evaluation_microbatch if isinstance(batches, Evaluated) else batches.microbatch
        binding.state.begin(step, load)
        program = binding.of_evaluation(self._forwards)
        with ExitStack() as stack:
            for index, stage in self._stages.items():
                stack.enter_context(evaluation_of(index, stage).evaluating())
            self._evaluated.begin()
            if "evaluation" in self._untried:
                stack.enter_context(self._trying("evaluation"))
            for inbox in binding.inboxes.values():
                inbox.begin(self._patience.seconds)
            return self._walk(program, binding, step).result().losses

    @contextmanager
    def _trying(self, walk: Walk) -> Iterator[None]:
        """Let tensors pass through the host, for a walk that may use a part of the GPU for the first time."""
        # Peers that receive what this rank has sent may still compile.
        patience = max(self._timeout, self._options.startup_timeout or 0.0)
        self._pinned.kept = []
        with naming_errors(self._rank, "between steps"):
            self._transport.through_host(True, patience)
        yield  # after an error, the transport is unusable
        with naming_errors(self._rank, "between steps"):
            self._transport.through_host(False, patience)
        self._pinned.kept = None
        if walk == "evaluation" or self._starting <= 1:
            self._untried.discard(walk)

    def _walk(
        self, program: Iterable[Bound | BoundPair | BoundCopy], binding: Binding, step: int
    ) -> Launched:
        """Launch instructions in order."""
        timeline, progress, patience, rank = self._timeline, self._progress, self._patience, self._rank
        timeline.begin()
        mark, done, check, queued = timeline.mark, self._on_stage_done, self._check, self._queued
        walk, self._walks = self._walks, self._walks + 1
        records = []
        value: Any = None
        is_collecting = gc.isenabled()
        # A rank that stops to collect garbage delays every rank that needs its next tensor.
        gc.disable()
        try:
            for bound in program:
                if not isinstance(bound, Bound):
                    records += self._run_other(bound, walk, step, patience)
                    continue
                instruction, take, run, pass_on = bound
                progress.now = (step, instruction)
                if queued is not None:
                    queued.make_room()
                wait, peer = mark(), instruction.peer
                try:
                    check()
                except (TimeoutError, ConnectionError) as error:
                    raise send_failed(error, rank, instruction) from error
                if take is None:
                    start = mark()
                    output = run()
                else:
                    progress.waiting_for = peer
                    try:
                        value = take()
                    except (TimeoutError, ConnectionError) as error:
                        if peer is None:  # an error of the user's data
                            raise
                        raise not_received(error, rank, instruction, patience) from error
                    progress.waiting_for = None
                    start = mark()
                    output = run(value)
                end = mark()
                if queued is not None:
                    queued.add(QueuedWork(walk, step, instruction, start, end, patience))
                if pass_on is not None:
                    try:
                        pass_on(output)
                    except (TimeoutError, ConnectionError) as error:
                        raise send_failed(error, rank, instruction) from error
                if done is not None and instruction.completes_stage:
                    done(instruction.action.stage)
                received = 0 if peer is None else bytes_of(value)
                records.append(Record(instruction.action, wait, start, end, received))
                value = output = None  # release the memory before the next action takes its input
        except Overdue as late:
            raise self._overdue(late) from late
        except Exception as error:
            self._mark(error, step, None if progress.now is None else progress.now[1], progress.waiting_for)
            raise
        finally:
            if is_collecting:
                gc.enable()
        waits = None
        if queued is not None:
            add = queued.add
            waits = DeviceWaits(
                lambda start, end: add(QueuedWork(walk, step, None, start, end, patience)),
                partial(self._finish, queued, walk),
            )
        return Launched(step, binding.state.losses, records, timeline, waits)

    def _run_other(
        self, bound: BoundPair | BoundCopy, walk: int, step: int, patience: Patience
    ) -> list[Record]:
        """Run a pair, or an entry of a copy, which has no record."""
        if isinstance(bound, BoundPair):
            return cast(Pairs, self._pairs).walk(bound, walk, step, patience)
        self._progress.now = (step, bound)
        cast(Copies, self.copies).run(bound.action)
        return []

    def _finish(self, queued: Queued, walk: int) -> list[float]:
        try:
            return queued.finish(walk)
        except Overdue as late:
            raise self._overdue(late) from late

    def _overdue(self, late: Overdue) -> Exception:
        error = overdue(late, self._rank, self._siblings)
        instruction = late.work.instruction
        peer = None if instruction is None or (late.started and self._siblings) else instruction.peer
        self._mark(error, late.work.step, instruction, peer)
        return error

    def _check_queued(self) -> None:
        """Check for failures while the host waits for the device, at its newest action."""
        now = self._progress.now
        try:
            self._check()
        except (TimeoutError, ConnectionError) as error:
            if now is None:
                raise
            raise send_failed(error, self._rank, now[1]) from error

    def _mark(self, error: Exception, step: int, instruction: Place | None, peer: int | None) -> None:
        """Record where an error happened: as a note for people, and for :func:`progress_of_error`.

        Parameters
        ----------
        peer
            The rank that this rank waited for. An earlier send may fail at any action, and the rank that
            sends that action's input is not to blame for it.
        """
        action = None if instruction is None else str(instruction.action)
        attach_progress(error, Progress(step, action, peer))
        error.add_note(f"rank {self._rank}, step {step}, action {action}")
