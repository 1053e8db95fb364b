"""One stage of the model on its rank: runs F, I, W and B, and holds exactly the memory that the plan states.

=======  ===========================================================================================
after    held of that microbatch
=======  ===========================================================================================
F        the stage's input and autograd graph (its saved activations), but not the output. A recomputed
         stage holds only its layers' inputs (:mod:`zbv_worker.stage.recomputation`)
I        the queued weight gradients: inputs and output gradients of the layers that queue
W, B     nothing
=======  ===========================================================================================

One value per microbatch passes between stages: a tensor, or containers of tensors and constants
(:mod:`zbv_worker.values.structure`). It is detached on both sides, so that the graphs of two stages never
join, not even at the turn of the V where one rank hosts both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zbv_worker.errors import ModelError
from zbv_worker.stage.boundary import (
    Gradient,
    as_list,
    enter,
    enter_to_write,
    leave,
    note_writes,
    take_gradient,
)
from zbv_worker.stage.compiled import CompiledLayer
from zbv_worker.stage.dtensors import fully_sharded_modules
from zbv_worker.stage.kept import Kept, private
from zbv_worker.stage.layers import NO_KEYWORDS, Keywords, call, loss_modules, prepare_layers
from zbv_worker.stage.loss import AuxiliaryLosses, Loss, Objective, Running, WeightedLoss
from zbv_worker.stage.recomputation import (
    CheckGraph,
    Recomputed,
    Segment,
    checked_segment,
    parameters_of_several,
    require_no_hooks,
)
from zbv_worker.stage.recorder import SplitShare, defer_weight_gradients, deferred_parameters
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.values.structure import Structure, device_of, is_plain, tensors_of

_LEAF = "leaf Variable that requires grad"
"""What torch says before a layer would write to a stage's input that is a leaf."""


class _Forward(NamedTuple):
    """The state that F leaves behind."""

    inputs: Sequence[Tensor]
    """The tensors of the input whose gradients are needed."""
    batch: Sequence[Tensor]
    """In the first stage, the user's tensors that ``inputs`` were detached from."""
    is_single: bool
    """Whether the input is one floating tensor."""
    edges: Sequence[GradientEdge] | Recomputed
    """Where the gradients of the output enter the graph."""
    seed: Tensor | None
    """The gradient of the loss."""
    auxiliary: tuple[list[GradientEdge], list[Tensor]] | None
    """Where auxiliary losses enter the graph, and their gradients."""
    weight_grads: WeightGrads | None
    without_gradient: Callable[[], Tensor] | None = None
    """Makes zeros like the input, if nothing below needs the input's gradient."""


class Stage:
    """A stage's module and the state of its microbatches.

    Parameters
    ----------
    loss
        The model's loss, for the last stage only: F then includes and returns it. If it returns a pair of sum
        and weight, gradients are those of the sum divided by ``microbatches``; the caller divides by the
        weights (:meth:`take_weight`).
    microbatches
        The number of microbatches that the loss is averaged over: m times the replicas of the pipeline.
        Gradients are divided by it.
    autocast
        The smaller dtype that operators may compute in; None for none.
    layers
        The layers that the module runs in sequence, to recompute them one by one; None if only the module
        knows them. The module is then recomputed as a whole.

    is_compiled
        Whether ``torch.compile`` compiles the layers. Recomputed F's and evaluations run uncompiled.

    Attributes
    ----------
    is_recomputed
        Whether F keeps no activations, and I or B recompute them. A change takes effect from the next F on.
    trains_below
        Whether a stage before this one trains, or the user's batch needs a gradient. Otherwise a plain tensor
        enters like data: I computes no gradient of it, and gives zeros. Must not change during a step.
    loss_scale
        The factor of all gradients; must not change during a step.
    keywords
        The keyword arguments that the layers take.
    check_graph
        Called once, for the next graph: with the tensors that it computes, and those that it begins at.
    objective
        The loss; None if this is not the last stage.
    auxiliary
        The auxiliary losses of the layers.
    """

    def __init__(
        self,
        index: int,
        n_stages: int,
        module: nn.Module,
        microbatches: int,
        loss: Loss | WeightedLoss | None = None,
        autocast: torch.dtype | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        is_recomputed: bool = False,
        is_compiled: bool = False,
    ):
        if (index == n_stages - 1) != (loss is not None):
            raise ModelError(f"stage {index} of {n_stages}: the last stage, and no other, takes the loss.")
        prepare_layers(module)
        self._recorder = defer_weight_gradients(module)
        self.index = index
        self.module = module
        self.is_recomputed = is_recomputed
        self.trains_below = True
        self._is_first = index == 0
        self._layers = (module,) if layers is None else tuple(layers)
        self._compiled = [CompiledLayer(layer, self._recorder) for layer in self._layers if is_compiled]
        self.keywords = Keywords.of(self._layers)
        self.objective = None if loss is None else Objective(loss)
        self._share = 1.0 / microbatches
        self._autocast = autocast
        self.loss_scale = 1.0
        self.auxiliary = AuxiliaryLosses(is_weighted=isinstance(loss, WeightedLoss))
        self._is_sharded = bool(fully_sharded_modules(module))
        self._is_checked = False
        self._writes: bool | None = None  # to its input; known after the first F
        self._has_split = False
        self._split_share: SplitShare | None = None
        self._shared = parameters_of_several([*self._layers, *loss_modules(module)])
        self.check_graph: CheckGraph | None = None
        self._input_gradients: list[tuple[Tensor, Tensor]] = []
        self._forwards: dict[int, _Forward] = {}
        self._weight_grads: dict[int, WeightGrads] = {}

    @property
    def takes_keywords(self) -> bool:
        """Whether a layer takes keyword arguments, so that the stage needs every microbatch's."""
        return bool(self.keywords)

    @property
    def writes_to_input(self) -> bool:
        """Whether layers write to the stage's input in place, as far as known."""
        return self._writes is True

    def forward(
        self,
        microbatch: int,
        input: Any,
        target: Any = None,
        *,
        split: bool,
        keywords: Mapping[str, Any] = NO_KEYWORDS,
    ) -> Any:
        """Run F; returns the stage's output, detached. The last stage returns the loss, a scalar.

        The output may be any value of :mod:`zbv_worker.values.structure`. If it is not one floating tensor,
        those of its tensors that need a gradient require one, and the next stage must get them so.

        Parameters
        ----------
        split
            Whether the backward will be I and W, or B.
        keywords
            The keyword arguments of the microbatch; each layer gets those that it takes.
        """
        weight_grads = WeightGrads() if split else None
        auxiliary, objective = self.auxiliary, self.objective
        auxiliary.factor = factor = self.loss_scale * self._share
        if self.is_recomputed and self._layers:
            return self._forward_to_recompute(microbatch, input, target, keywords, weight_grads)
        written = None
        is_data = self._is_first or not self.trains_below
        if self._writes is False:  # most F's
            x, leaves = enter(input, is_data=is_data)
        else:
            x, leaves, written = enter_to_write(input, is_data=is_data)
        try:
            with Running(auxiliary, "forward", self._recorder, weight_grads):
                if self._autocast is None:  # the check is cheaper than a context that does nothing
                    output = self._computed(x, target, keywords)
                else:
                    with self._computing(x):
                        output = self._computed(x, target, keywords)
        except RuntimeError as error:
            if self._writes is not False or auxiliary.edges or _LEAF not in str(error):
                raise
            self._writes = True  # a layer has begun to write, for instance a dropout that was switched on
            return self.forward(microbatch, input, target, split=split, keywords=keywords)
        if written is not None:
            writes = note_writes(written, output, is_data=is_data)
            self._writes = writes or self._writes is True
        batch = _requiring_grad(input) if leaves and self._is_first else ()
        seed = None
        if objective is not None:
            if objective.is_weighted or objective.outputs is not None:
                objective.count()
            seed = objective.seed(output, factor)
        if not (self._is_checked or isinstance(output, Tensor)):
            self._require_sendable(output)
        outgoing, edges = leave(output)
        if self.check_graph is not None:
            self.check_graph(tensors_of(output), leaves)
            self.check_graph = None
        roots = auxiliary.take_roots() if auxiliary.edges else None
        without = None if self._is_first or self.trains_below or leaves else _zeros_like(x)
        self._forwards[microbatch] = _Forward(
            leaves, batch, is_plain(x), edges, seed, roots, weight_grads, without
        )
        return outgoing

    def backward(self, microbatch: int, grad_output: Any) -> Any:
        """Run B, computing all gradients; returns the input's gradient, None for the first stage.

        Parameters
        ----------
        grad_output
            The gradient of the output: one tensor if it is one floating tensor, otherwise one per tensor that
            requires a gradient. None for the last stage, whose output is the loss.
        """
        held = self._forwards.pop(microbatch)
        grad_input = self._backpropagate(held, grad_output)
        if held.weight_grads is not None:
            held.weight_grads.run()
        return grad_input

    def backward_input(self, microbatch: int, grad_output: Any) -> Any:
        """Run I: compute the input's gradient, None for the first stage, and queue the weights' for W."""
        held = self._forwards.pop(microbatch)
        # Not `or`: the queue is still empty, hence falsy, but the forward refers to it.
        queue = held.weight_grads if held.weight_grads is not None else WeightGrads()
        self._weight_grads[microbatch] = queue
        grad_input = self._backpropagate(held, grad_output)
        if not self._has_split:  # now, because a sharded stage has other parameters between steps
            self._has_split, self._split_share = True, SplitShare.of(self.module, queue.parameters())
        return grad_input

    def backward_weight(self, microbatch: int) -> None:
        """Run W: compute the queued weight gradients and accumulate them into ``.grad``."""
        self._weight_grads.pop(microbatch).run()

    def tensors(self) -> list[Tensor]:
        """What the stage holds all the time: parameters and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]

    def hold_inputs(self, microbatch: int, kept: Kept) -> None:
        """Call after F: add what it keeps besides what autograd saves to what leaves the device's memory."""
        held = self._forwards[microbatch]
        if isinstance(held.edges, Recomputed):
            held.edges.hold_inputs(kept)
        for leaf in private(held.inputs):
            kept.hold(leaf)

    @property
    def in_action(self) -> Any:
        """What the action in progress has set, so that another action may begin; None sets nothing.

        It also keeps the sums that an F adds to: another stream may still read them.
        """
        sums = self.auxiliary._sum, None if self.objective is None else self.objective._weight
        return self._recorder.in_action, self.auxiliary.in_action, sums

    @in_action.setter
    def in_action(self, value: Any) -> None:
        recorder, losses, _ = ((None, None, None), ("forward", [], []), None) if value is None else value
        self._recorder.in_action, self.auxiliary.in_action = recorder, losses

    def can_interleave(self, microbatch: int, other: Any) -> bool:
        """Whether the backward of a microbatch may begin, and end, while another stage or this one runs F.

        Not if it restores buffers that the F updates, nor with ``fully_shard``, whose hooks know one layer in
        progress.
        """
        edges = self._forwards[microbatch].edges
        if other is self and isinstance(edges, Recomputed) and edges.restores_buffers:
            return False
        return not (self._is_sharded or getattr(other, "_is_sharded", False))

    @property
    def expected_share(self) -> SplitShare | None:
        """The share of gradients in W, as far as known before the first F; None without parameters."""
        return SplitShare.of(self.module, deferred_parameters(self.module))

    @property
    def split_share(self) -> SplitShare | None:
        """The share of gradients in W, known after the first I; None without trainable parameters."""
        return self._split_share

    def _forward_to_recompute(
        self,
        microbatch: int,
        input: Any,
        target: Any,
        keywords: Mapping[str, Any],
        weight_grads: WeightGrads | None,
    ) -> Any:
        require_no_hooks(self._shared, self.index)
        x, leaves = enter(input, is_data=self._is_first or not self.trains_below)
        batch = _requiring_grad(input) if leaves and self._is_first else ()
        seed = None
        if self.objective is not None:
            seed = partial(self.objective.seed, value=self.loss_scale * self._share)
        recomputed = Recomputed(self._computing, seed, self.auxiliary, self.check_graph)
        self.check_graph = None
        with Running(self.auxiliary, "forward"):
            output = recomputed.forward(self._segments(target, keywords), x, self.module.modules())
        if self.objective is not None:
            self.objective.count()
        without = None if self._is_first or self.trains_below or leaves else _zeros_like(x)
        self._forwards[microbatch] = _Forward(
            leaves, batch, is_plain(x), recomputed, None, None, weight_grads, without
        )
        self._require_sendable(output)
        return leave(output)[0]

    @property
    def _trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def _segments(self, target: Any, keywords: Mapping[str, Any]) -> list[Segment]:
        """The segments to recompute in sequence; the loss belongs to the segment of the last layer."""
        segments = [checked_segment(layer, keywords, self.index) for layer in self._layers]
        if self.objective is None:
            return segments
        # Otherwise the last layer's output would be kept from F on: with a large vocabulary, the largest
        # tensor.
        last, objective = segments.pop(), self.objective
        return [*segments, lambda x: objective(last(x), target)]

    def _computing(self, x: Any) -> AbstractContextManager[object]:
        """The context in which a forward runs."""
        return nullcontext() if self._autocast is None else torch.autocast(device_of(x).type, self._autocast)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """A context in which no layer runs compiled code."""
        compiled, self._compiled = self._compiled, []
        try:
            yield
        finally:
            self._compiled = compiled

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which all modules are in evaluation mode; restores each module's mode afterwards."""
        before = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            # First by each module's own train(): it may undo what eval() did, such as merging weights.
            # Parents precede their children, which may be in evaluation mode on purpose.
            for module, mode in before:
                if module.training != mode:
                    module.train(mode)
            for module, mode in before:
                module.training = mode

    def evaluate(self, input: Any, target: Any = None, *, keywords: Mapping[str, Any] = NO_KEYWORDS) -> Any:
        """Run F without keeping anything for a backward; returns the output, for the last stage the loss."""
        may_write = self._is_first and self._writes is not False
        x = (enter_to_write if may_write else enter)(input, is_data=True)[0]
        with torch.no_grad(), self._computing(x), Running(self.auxiliary, "evaluation"):
            output = self._computed(x, target, keywords)
        if self.objective is not None:
            self.objective.count()
        self._require_sendable(output)
        return leave(output)[0]

    @property
    def is_weighted(self) -> bool:
        """Whether the loss is a pair of sum and weight; for a plain function, known after the first F.

        Auxiliary losses of all stages then need a weight, so set it on every stage before the first F.
        """
        return self.auxiliary.is_weighted or (self.objective is not None and self.objective.is_weighted)

    @is_weighted.setter
    def is_weighted(self, value: bool) -> None:
        self.auxiliary.is_weighted = value

    def take_weight(self) -> Tensor | float:
        """The sum of the weights of all microbatches since the last call; does not wait for a GPU."""
        return 0.0 if self.objective is None else self.objective.take_weight()

    @property
    def held(self) -> tuple[set[int], set[int]]:
        """Microbatches between F and I or B, and microbatches between I and W."""
        return set(self._forwards), set(self._weight_grads)

    def take_input_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors of the batch that require a gradient, and their gradients, since the last call."""
        taken, self._input_gradients = self._input_gradients, []
        return taken

    def _computed(self, x: Any, target: Any, keywords: Mapping[str, Any]) -> Any:
        """The module's output, for the last stage the loss."""
        # The first F shows whether layers write to their input, which changes what is compiled. F of I and W
        # runs uncompiled once by itself.
        is_new = self._writes is None and self._recorder.queue is None
        if not self._compiled or is_new or not torch.is_grad_enabled():
            output = call(self.module, x, keywords)
        else:
            output = x
            for layer in self._compiled:
                output = layer(output, keywords)
        return output if self.objective is None else self.objective(output, target)

    def _require_sendable(self, output: Any) -> None:
        """Raise :class:`ModelError` if an output is not a value that can be sent; look only once."""
        if self._is_checked or isinstance(output, Tensor):
            return
        try:
            Structure.of(output)
        except ModelError as error:
            raise ModelError(f"stage {self.index}: {error}") from error
        self._is_checked = True

    def _backpropagate(self, held: _Forward, grad_output: Gradient | None) -> Gradient | None:
        # A stage may have nothing to propagate: no trainable parameter before its first use of the input.
        edges = held.edges
        without = held.without_gradient
        needs_input_grad = bool(held.batch) or not (self._is_first or without is not None)
        gradient: Gradient | None = None
        # Checkpointing may run forwards again, which then must find the queue and the auxiliary losses.
        with Running(self.auxiliary, "backward", self._recorder, held.weight_grads):
            if isinstance(edges, Recomputed):
                if not (needs_input_grad or self._trains):
                    edges.drop()
                gradient = edges.backward(grad_output, needs_input_grad=needs_input_grad)
            else:
                gradients = as_list(held.seed if grad_output is None else grad_output) if edges else ()
                if held.auxiliary is not None:
                    edges, gradients = [*edges, *held.auxiliary[0]], [*gradients, *held.auxiliary[1]]
                if edges:
                    torch.autograd.backward(edges, gradients)
                if needs_input_grad:
                    gradient = take_gradient(held.inputs, is_single=held.is_single)
        if without is not None:  # the stage before expects a tensor, which it does not use
            return without()
        if not self._is_first:
            return gradient
        if held.batch:
            self._input_gradients += zip(held.batch, as_list(gradient), strict=True)
        return None


def _requiring_grad(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


def _zeros_like(value: Any) -> Callable[[], Tensor] | None:
    """A function that makes zeros like one floating tensor, without keeping it; None for other values."""
    if not is_plain(value):
        return None
    return partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)
