"""The two halves of a pair take turns: the F of one microbatch, and the I or B of another.

Each half computes while the other communicates. The backward runs on a second thread, but only the half whose
turn it is runs: a half starts a collective, hands over, and waits for the collective when it is its turn
again. A half that ends leaves all turns to the other. So the order of everything that the two do follows from
the program alone, and all ranks of a group issue its collectives in one order, whatever the delays. Without
turns, two threads deadlock: on one rank F's collective may come first, on another the backward's. torchtitan
does it likewise (``dual_pipe_v.py``: a barrier at each exchange of tokens), but there both threads run
between two barriers.

The backward has the first turn. An exchange of tokens is usually the first thing that it does, and the last
that F does, so both are hidden.

At each change of turns, each half gets back what the other one may have changed: what an action in progress
has set on its stage, and the states of random number generators, which a backward that recomputes winds back.
The second thread gets what torch keeps per thread.

A turn ends at a collective that Python passes to a process group of ``torch.distributed``. Others, such as
functional collectives and those of other libraries, belong to the computation: they are correct, but not
hidden, unless the layer calls :func:`hand_over`.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from zbv_solver.plans.orders import Action

from zbv_worker.errors import ModelError
from zbv_worker.execution.binding import Bound
from zbv_worker.stage.recomputation import default_generators

if TYPE_CHECKING:
    from zbv_worker.execution.pairs import Pairs

Overlap = Callable[["Half", "Half"], object]
"""Runs a pair: takes the forward and the backward, and calls each once."""

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
"""The methods of a process group that start a collective, in any version of torch."""


@runtime_checkable
class Interruptible(Protocol):
    """A stage that may begin an action while another one is in progress."""

    in_action: Any
    """What the action in progress has set; None sets it as before an action."""

    def can_interleave(self, microbatch: int, other: Any) -> bool:
        """Whether the backward of a microbatch may take turns with an F of another stage, or of this one."""


class _Abandoned(BaseException):
    """The other half has failed: unwinds a half that waits for its turn."""


class Half:
    """One action of a pair; a call runs it.

    Attributes
    ----------
    action
        The stage, letter and microbatch.
    module
        The stage's module; None if the stage has none.
    has_collectives
        Whether this action of the stage started a collective when it last ran in a pair, on any microbatch.
    """

    def __init__(self, pairs: Pairs, bound: Bound, wait: Any, value: Any):
        self.pairs, self.bound, self.wait, self.value = pairs, bound, wait, value
        self.action: Action = bound.instruction.action
        self.stage = pairs.stages[self.action.stage]
        self.module: nn.Module | None = getattr(self.stage, "module", None)
        self.has_collectives = pairs.collectives(self.action) > 0
        self.start: Any = None
        self.end: Any = None
        self.output: Any = None
        self.stream: Any = None
        self.is_begun = self.is_done = False
        self.collectives = 0
        self.turns: _Turns | None = None
        self._coalescing = 0

    def __call__(self) -> None:
        """Run the action; raises :class:`ModelError` at a second call."""
        if self.is_begun:
            raise ModelError(f"{self.action} was run twice; a function for pairs must call each half once.")
        self.is_begun = True
        is_backward = self.action.letter != "F"
        self.pairs.turn_to(self)
        before, _HERE.half = _HERE.half, self
        if is_backward:
            _RUNNING.append(self)
        try:
            with self.pairs.on(self.stream):
                self.start = self.pairs.mark()
                run, value = self.bound.run, self.value
                self.output = run() if self.bound.take is None else run(value)
                self.end = self.pairs.mark()
        finally:
            _HERE.half = before
            if is_backward:
                _RUNNING.remove(self)
        self.is_done = True

    def started(self, coalesced: int) -> None:
        """Let the other half run. Collectives that become one (``coalesced``) hand over once."""
        self._coalescing += coalesced
        if not self._coalescing:
            self.collectives += 1
            if self.turns is not None:
                self.turns.hand_over(self)


class _HalfOfThread(threading.local):
    half: Half | None = None


_HERE = _HalfOfThread()
_RUNNING: list[Half] = []
"""The backwards of pairs that run, in all threads."""


def _calling_half() -> Half | None:
    """The half that calls; None outside of pairs."""
    half = _HERE.half
    if half is None and _RUNNING and torch._C._current_graph_task_id() != -1:
        return _RUNNING[-1]  # on a GPU, a thread of autograd runs the backward
    return half


def hand_over(x: Tensor) -> Tensor:
    """Let the other half of a pair run, here and at this place of the backward; returns ``x``.

    For layers whose communication does not start in a process group of ``torch.distributed``, or not from
    Python: call it where such communication has just started. All ranks that communicate must reach the same
    calls in the same order. Outside of pairs it does nothing.
    """
    handed: Tensor = _HandOver.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    return handed


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        collective_started()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        collective_started()
        return gradients[0]


def collective_started(coalesced: int = 0) -> None:
    """Let the other half of a pair run, if a half calls this."""
    half = _calling_half()
    if half is not None:
        half.started(coalesced)


def notice_collectives() -> None:
    """Make process groups end turns at collectives. A second call has no effect.

    There is no other place where all collectives from Python pass: a mode of dispatch would slow every
    operator down.
    """
    coalescing = {"_start_coalescing": 1, "_end_coalescing": -1}
    for name in (*_COLLECTIVES, *coalescing):
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None and not isinstance(original, _EndingTurn):
            setattr(dist.ProcessGroup, name, _EndingTurn(original, coalescing.get(name, 0)))


class _EndingTurn:
    """A method of process groups after which the other half runs."""

    def __init__(self, original: Any, coalesced: int):
        self._original, self._coalesced = original, coalesced
        update_wrapper(self, original)

    def __get__(self, group: Any, kind: type | None = None) -> Any:
        return self if group is None else partial(self, group)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        work = self._original(*arguments, **options)
        if _RUNNING or _HERE.half is not None:
            collective_started(self._coalesced)
        return work


def in_turns(forward: Half, backward: Half) -> None:
    """Run a pair on two threads that hand over at each collective: the usual way.

    Runs one after the other what cannot take turns (:meth:`Interruptible.can_interleave`). Raises what a half
    raises; the other half then ends too.
    """
    if not _can_interleave(forward, backward):
        forward()
        backward()
        return
    turns, state, errors = (
        _Turns(forward, backward),
        _ThreadState(forward.pairs.device),
        list[BaseException](),
    )

    def run_backward() -> None:
        try:
            state.enter()
            turns.run(backward)
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(
        target=contextvars.copy_context().run, args=(run_backward,), name="zbv-pair", daemon=True
    )
    second.start()
    try:
        turns.run(forward)
    except _Abandoned:  # by the backward, whose error follows
        pass
    except Exception:
        second.join()
        raise
    second.join()
    if errors:
        raise errors[0]
    turns.end()


def _can_interleave(forward: Half, backward: Half) -> bool:
    stage = backward.stage
    if isinstance(stage, Interruptible):
        return stage.can_interleave(backward.action.microbatch, forward.stage)
    return True


class _Turns:
    """Two halves of which one runs at any moment, the backward first."""

    def __init__(self, forward: Half, backward: Half):
        self._halves = forward, backward
        self._go = {half: threading.Semaphore(0) for half in self._halves}
        self._ended: set[Half] = set()
        self._has_failed = False
        stages = dict.fromkeys((forward.stage, backward.stage))
        self._stages = [stage for stage in stages if isinstance(stage, Interruptible)]
        self._generators = default_generators(forward.pairs.device)
        self._shared = {forward: self._taken()}
        # Numbers that the backward draws must not be those that F draws at the same time.
        self._begun = [_seeded(generator) for generator in self._generators]
        self._put(([None] * len(self._stages), self._begun))
        self._go[backward].release()

    def run(self, half: Half) -> None:
        """Run a half, from its first turn to its end."""
        half.turns = self
        try:
            self._wait(half)
            half()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            half.turns = None
            self._ended.add(half)
            self._pass(half)

    def hand_over(self, half: Half) -> None:
        """Let the other half run until it hands over or ends."""
        if self._other(half) not in self._ended:
            self._pass(half)
            self._wait(half)
            half.pairs.turn_to(half)
        elif self._has_failed:
            raise _Abandoned

    def end(self) -> None:
        """Call when both have ended: set what F has left behind."""
        forward, backward = self._halves
        self._put(self._shared[forward])
        drawn = zip(self._generators, self._begun, self._shared[backward][1], strict=True)
        for generator, before, after in drawn:
            if not torch.equal(before, after):  # the next backward must draw others
                torch.empty(1, device=generator.device).uniform_(generator=generator)

    def _other(self, half: Half) -> Half:
        forward, backward = self._halves
        return backward if half is forward else forward

    def _wait(self, half: Half) -> None:
        self._go[half].acquire()
        if self._has_failed:
            raise _Abandoned

    def _pass(self, half: Half) -> None:
        other = self._other(half)
        if not self._has_failed:
            self._shared[half] = self._taken()
            if other not in self._ended and other in self._shared:
                self._put(self._shared[other])
        self._go[other].release()

    def _taken(self) -> _Shared:
        return [stage.in_action for stage in self._stages], [g.get_state() for g in self._generators]

    def _put(self, shared: _Shared) -> None:
        for stage, in_action in zip(self._stages, shared[0], strict=True):
            stage.in_action = in_action
        for generator, state in zip(self._generators, shared[1], strict=True):
            generator.set_state(state)


_Shared = tuple[list[Any], list[Tensor]]
"""What two halves share: what an action in progress has set on each stage, and the generators' states."""


def _seeded(generator: torch.Generator) -> Tensor:
    """The state of another generator, whose seed follows from the state of this one."""
    digest = blake2b(generator.get_state().numpy().tobytes(), digest_size=7).digest()
    return torch.Generator(generator.device).manual_seed(int.from_bytes(digest)).get_state()


class _ThreadState:
    """What torch keeps for the calling thread, and a new thread begins without."""

    def __init__(self, device: torch.device):
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]
        self._is_multithreaded = torch._C._is_multithreading_enabled()
        self._replays_views = torch._C._is_view_replay_enabled()
        self._saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's own
        self._dispatch_modes = _get_current_dispatch_mode_stack()

    def enter(self) -> None:
        """Set it for the calling thread, which must be new."""
        torch.set_grad_enabled(self._grad)
        for kind, is_enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(False)  # as that of the other half
        torch._C._set_multithreading_enabled(self._is_multithreaded)
        torch._C._set_view_replay_enabled(self._replays_views)
        if self._saving is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._saving)
        for mode in self._function_modes:
            push_function_mode(mode)  # type: ignore[no-untyped-call]  # torch's own
        for mode in self._dispatch_modes:
            push_dispatch_mode(mode)
