"""One stage of the model on its rank: runs F, I, W and B, and holds exactly the memory that the plan states.

=======  ===========================================================================================
after    held of that microbatch
=======  ===========================================================================================
F        the stage's input and autograd graph (its saved activations), but not the output. A recomputed
         stage holds only its layers' inputs (:mod:`zbv_worker.stage.recomputation`)
I        the queued weight gradients: inputs and output gradients of the layers that queue
W, B     nothing
=======  ===========================================================================================

One tensor per microbatch passes between stages. It is detached on both sides, so that the graphs of two
stages never join, not even at the turn of the V where one rank hosts both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.stage.compiled import CompiledLayer
from zbv_worker.stage.recomputation import Recomputed, Segment
from zbv_worker.stage.self_deferring import SelfDeferring, delayed_parameters
from zbv_worker.stage.split_backward import defer_weight_gradients, deferred_parameters
from zbv_worker.stage.split_share import SplitShare
from zbv_worker.stage.weight_grads import WeightGrads, has_hooks

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes output and target; returns the mean over a microbatch."""


@dataclass(frozen=True)
class WeightedLoss:
    """A loss whose function returns the sum over a microbatch and its weight."""

    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _Forward(NamedTuple):
    """The state that F leaves behind.

    The output is held as its edge in the graph, not as a tensor: its values are not needed after they were
    sent, unless the graph itself saved them.
    """

    input: Tensor
    output: GradientEdge | Recomputed | None
    loss_seed: Tensor | None
    weight_grads: WeightGrads | None


class Stage:
    """A stage's module and the state of its microbatches.

    Parameters
    ----------
    loss
        The model's loss, for the last stage only: F then includes and returns it. With a weighted loss,
        gradients are those of the sum divided by ``microbatches``; the caller divides by the weights
        (:meth:`take_weight`).
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
    loss_scale
        The factor of all gradients; must not change during a step.
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
        self._recorder = defer_weight_gradients(module)
        self._self_deferring = SelfDeferring(module)
        if is_compiled and not self._self_deferring.is_empty:
            raise ModelError(
                f"stage {index}: found modules that defer their weight gradients by themselves, which "
                f"compiled code cannot. Run without --compile."
            )
        self.index = index
        self.module = module
        self.is_recomputed = is_recomputed
        self._is_first = index == 0
        self._layers = (module,) if layers is None else tuple(layers)
        self._compiled = [CompiledLayer(layer, self._recorder) for layer in self._layers if is_compiled]
        self._loss = loss
        self._last_weight: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._share = 1.0 / microbatches
        self._autocast = autocast
        self.loss_scale = 1.0
        self._seed: tuple[float, Tensor] | None = None
        self._has_split = False
        self._split_share: SplitShare | None = None
        self._shared = _parameters_of_several(self._layers)
        self._forwards: dict[int, _Forward] = {}
        self._weight_grads: dict[int, WeightGrads] = {}

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """Run F; returns the stage's output, detached. The last stage returns the loss, a scalar.

        Parameters
        ----------
        split
            Whether the backward will be I and W, or B.
        """
        x = input.detach()
        weight_grads = WeightGrads() if split else None
        if self.is_recomputed and self._layers:
            return self._forward_to_recompute(microbatch, x, target, weight_grads)
        if not self._is_first:
            x.requires_grad_()
        with self._recorder.into(weight_grads):
            if self._autocast is None:  # the check is cheaper than a context that does nothing
                output = self._computed(x, target)
            else:
                with torch.autocast(x.device.type, self._autocast):
                    output = self._computed(x, target)
        self._weigh()
        seed = self._loss_seed(output) if self._loss is not None else None
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._forwards[microbatch] = _Forward(x, edge, seed, weight_grads)
        return output.detach()

    def backward(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Run B, computing all gradients; returns the input's gradient, None for the first stage.

        Parameters
        ----------
        grad_output
            The gradient of the output; None for the last stage, whose output is the loss.
        """
        held = self._forwards.pop(microbatch)
        if not self._self_deferring.is_empty:
            return self._backward_at_once(held, grad_output)
        grad_input = self._backpropagate(held, grad_output)
        if held.weight_grads is not None:
            held.weight_grads.run()
        return grad_input

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """Run I: compute the input's gradient, None for the first stage, and queue the weights' for W."""
        held = self._forwards.pop(microbatch)
        # Not `or`: the queue is still empty, hence falsy, but the forward refers to it.
        queue = held.weight_grads if held.weight_grads is not None else WeightGrads()
        self._weight_grads[microbatch] = queue
        if self._self_deferring.is_empty:  # the check is cheaper than a context that does nothing
            grad_input = self._backpropagate(held, grad_output)
        else:
            with self._self_deferring.deferring(queue):
                grad_input = self._backpropagate(held, grad_output)
        if not self._has_split:  # now, because a sharded stage has other parameters between steps
            self._has_split, self._split_share = True, SplitShare.of(self.module, queue.parameters())
        return grad_input

    def backward_weight(self, microbatch: int) -> None:
        """Run W: compute the queued weight gradients and accumulate them into ``.grad``."""
        self._weight_grads.pop(microbatch).run()

    def _backward_at_once(self, held: _Forward, grad_output: Tensor | None) -> Tensor | None:
        """Run B in a stage with modules that always defer their weight gradients."""
        queue = WeightGrads() if held.weight_grads is None else held.weight_grads
        with self._self_deferring.deferring(queue):
            grad_input = self._backpropagate(held, grad_output)
        queue.run()
        return grad_input

    @property
    def expected_share(self) -> SplitShare | None:
        """The share of gradients in W, as far as known before the first F; None without parameters."""
        return SplitShare.of(self.module, deferred_parameters(self.module) | delayed_parameters(self.module))

    @property
    def split_share(self) -> SplitShare | None:
        """The share of gradients in W, known after the first I; None without trainable parameters."""
        return self._split_share

    def _forward_to_recompute(
        self, microbatch: int, x: Tensor, target: Tensor | None, weight_grads: WeightGrads | None
    ) -> Tensor:
        if any(has_hooks(parameter) for parameter in self._shared):
            # The backward runs layer by layer, so a hook would be called once per layer with a partial
            # gradient.
            raise ModelError(
                f"stage {self.index}: a parameter that several layers share has hooks, and the plan "
                f"recomputes the stage. Remove the hooks, or plan without recomputing the stage."
            )
        recomputed = Recomputed(self._computing, None if self._loss is None else self._loss_seed)
        output = recomputed.forward(self._segments(target), x)
        self._weigh()
        self._forwards[microbatch] = _Forward(x, recomputed, None, weight_grads)
        return output.detach()

    def _segments(self, target: Tensor | None) -> list[Segment]:
        """The segments to recompute in sequence; the loss belongs to the segment of the last layer."""
        segments: list[Segment] = [self._checked(layer) for layer in self._layers]
        if self._loss is None:
            return segments
        # Otherwise the last layer's output would be kept from F on: with a large vocabulary, the largest
        # tensor.
        last = segments.pop()
        return [*segments, lambda x: self._with_loss(last(x), target)]

    def _checked(self, layer: nn.Module) -> Segment:
        def run(x: Tensor) -> Tensor:
            version = x._version
            output = checked_output(self.index, layer(x))
            # Without a graph autograd does not notice a changed input, and the recomputation would differ.
            if x._version != version:
                raise ModelError(
                    f"stage {self.index}: a {type(layer).__name__} modified its input, from which the layer "
                    f"is recomputed. Do not write to a layer's input (no inplace=True), or plan without "
                    f"recomputing the stage."
                )
            return output

        return run

    def _computing(self, x: Tensor) -> AbstractContextManager[object]:
        """The context in which a forward runs."""
        return nullcontext() if self._autocast is None else torch.autocast(x.device.type, self._autocast)

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
            for module, mode in before:  # not train(): some may be in evaluation mode on purpose
                module.training = mode

    def evaluate(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """Run F without keeping anything for a backward; returns the output, for the last stage the loss."""
        with torch.no_grad(), self._computing(input):
            output = self._computed(input.detach(), target).detach()
        self._weigh()
        return output

    def take_weight(self) -> Tensor | float:
        """The sum of the weights of all microbatches since the last call; does not wait for a GPU."""
        weight, self._weight = self._weight, 0.0
        return weight

    def _weigh(self) -> None:
        """Add the weight of the F that has just run; recomputations do not count."""
        if isinstance(self._loss, WeightedLoss):
            self._weight = self._weight + self._last_weight

    @property
    def held(self) -> tuple[set[int], set[int]]:
        """Microbatches between F and I or B, and microbatches between I and W."""
        return set(self._forwards), set(self._weight_grads)

    def _loss_seed(self, loss: Tensor) -> Tensor:
        """The gradient of the loss; autograd only reads it, so microbatches share one tensor."""
        value = self.loss_scale * self._share
        known = self._seed
        if known is None or known[0] != value or known[1].dtype is not loss.dtype:
            known = self._seed = (value, torch.full_like(loss, value, requires_grad=False))
        return known[1]

    def _computed(self, x: Tensor, target: Tensor | None) -> Tensor:
        """The module's output, for the last stage the loss."""
        if not self._layers:
            self._require_float(x)
        output = checked_output(self.index, self._run(x))
        return self._with_loss(output, target)

    def _run(self, x: Tensor) -> Tensor:
        if not self._compiled or not torch.is_grad_enabled():
            found: Tensor = self.module(x)
            return found
        for layer in self._compiled:
            x = layer(x)
        return x

    def _require_float(self, x: Tensor) -> None:
        """Refuse data that is not floating-point in an empty first stage: no gradient could come back."""
        if not x.is_floating_point():
            raise InvalidRun(
                f"stage {self.index} has no layers and would pass on a {x.dtype} tensor; between stages it "
                f"must be floating-point. Plan with a layer in the first stage."
            )

    def _with_loss(self, output: Tensor, target: Tensor | None) -> Tensor:
        if self._loss is None:
            return output
        if target is None:
            raise ModelError(f"stage {self.index}: the last stage's forward needs a target.")
        if not isinstance(self._loss, WeightedLoss):
            return checked_loss(self._loss(output, target))
        found: object = self._loss.function(output, target)
        total, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(weight, Tensor | int | float) or (
            isinstance(weight, Tensor) and weight.numel() != 1
        ):
            raise ModelError(f"loss_sum returned {_shown(weight)} as the weight; must return (sum, weight).")
        # float64, because float32 counts exactly only to 16 million.
        self._last_weight = weight.detach().double() if isinstance(weight, Tensor) else float(weight)
        return checked_loss(total)

    def _backpropagate(self, held: _Forward, grad_output: Tensor | None) -> Tensor | None:
        gradient = held.loss_seed if grad_output is None else grad_output
        # A stage may have nothing to propagate: no trainable parameter before its first use of the input.
        if isinstance(held.output, Recomputed):
            with self._recorder.into(held.weight_grads):
                grad_input = held.output.backward(gradient, needs_input_grad=not self._is_first)
        else:
            if held.output is not None:
                with self._recorder.into(held.weight_grads):  # checkpointing may run forwards again
                    torch.autograd.backward(held.output, gradient)
            grad_input, held.input.grad = held.input.grad, None
        if self._is_first:
            return None
        return torch.zeros_like(held.input) if grad_input is None else grad_input


def _parameters_of_several(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trainable parameters that several of these layers share."""
    users = Counter(parameter for layer in layers for parameter in layer.parameters())
    return [parameter for parameter, count in users.items() if count > 1 and parameter.requires_grad]


def checked_output(index: int, output: object) -> Tensor:
    """Return a stage's output if it is valid; raises :class:`ModelError` otherwise."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ModelError(
            f"stage {index} returned {_shown(output)}; must be one floating-point tensor. Pack several "
            f"tensors into one, or recompute them in the next stage."
        )
    return output


def checked_loss(loss: object) -> Tensor:
    """Return a loss if it is valid; raises :class:`ModelError` otherwise."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        of_several = f" of {loss.numel()} numbers" if isinstance(loss, Tensor) else ""
        raise ModelError(
            f"the loss returned {_shown(loss)}{of_several}; must be one floating-point number, the mean "
            f"over a microbatch. If microbatches have different weights, define loss_sum."
        )
    return loss


def _shown(output: object) -> str:
    return f"a {output.dtype} tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"
