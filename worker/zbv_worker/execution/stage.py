"""One stage of the model on its rank: runs F, I, W and B, and holds exactly what the plan says it holds.

=======  ===========================================================================================
after    held of that microbatch
=======  ===========================================================================================
F        the stage's input and autograd graph (its saved activations); not the output. Of a stage that
         is recomputed, only its layers' inputs (:mod:`zbv_worker.execution.recomputation`)
I        the queued weight gradients: inputs and output gradients of the layers that queue
W, B     nothing
=======  ===========================================================================================

Between stages there is one tensor per microbatch. It is detached on both sides, so that the graphs of two
stages never join, not even at the turn of the V where both live on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.recomputation import Recomputed, Segment
from zbv_worker.execution.split_backward import SplitShare, WeightGrads, defer_weight_gradients, has_hooks

Loss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""Of output and target: the mean over a microbatch, or the sum over it and its weight."""


class _Forward(NamedTuple):
    """What F leaves behind.

    The output is held as its edge into the graph, not as a tensor: its values are needed no more once they
    were sent, unless the graph itself saved them.
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
        The model's loss, for the last stage only: F then includes it, and returns it.
    is_weighted
        Whether the loss returns a sum and its weight. Gradients are then those of the sum divided by
        ``microbatches``; the caller divides by the weights (:meth:`take_weight`).
    microbatches
        Over which the loss is a mean: m, times the replicas of the pipeline. Gradients are divided by it.
    autocast
        The smaller type that operators may compute in; None for none.
    layers
        What the module runs one after the other, to recompute them one by one; None where only the module
        itself knows, which is then recomputed as a whole.

    Attributes
    ----------
    is_recomputed
        Whether F keeps no activations, and I or B compute them again. Holds from the next F on.
    loss_scale
        What gradients are multiplied by; a step's microbatches must all have the same.
    """

    def __init__(
        self,
        index: int,
        n_stages: int,
        module: nn.Module,
        microbatches: int,
        loss: Loss | None = None,
        autocast: torch.dtype | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        is_recomputed: bool = False,
        is_weighted: bool = False,
    ):
        if (index == n_stages - 1) != (loss is not None):
            raise ModelError(f"stage {index} of {n_stages}: the last stage, and no other, takes the loss.")
        self._recorder = defer_weight_gradients(module)
        self.index = index
        self.module = module
        self.is_recomputed = is_recomputed
        self._is_first = index == 0
        self._layers = (module,) if layers is None else tuple(layers)
        self._loss = loss
        self._is_weighted = is_weighted
        self._last_weight: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0
        self._share = 1.0 / microbatches
        self._autocast = autocast
        self.loss_scale = 1.0
        self._seed: tuple[float, Tensor] | None = None
        self._queued: set[Tensor] | None = None
        self._shared = _parameters_of_several(self._layers)
        self._forwards: dict[int, _Forward] = {}
        self._weight_grads: dict[int, WeightGrads] = {}

    def forward(self, microbatch: int, input: Tensor, target: Tensor | None = None, *, split: bool) -> Tensor:
        """F: the stage's output, detached; for the last stage the loss, a scalar.

        Parameters
        ----------
        split
            Whether the backward will come as I and W, or as B.
        """
        x = input.detach()
        weight_grads = WeightGrads() if split else None
        if self.is_recomputed and self._layers:
            return self._forward_to_recompute(microbatch, x, target, weight_grads)
        if not self._is_first:
            x.requires_grad_()
        with self._recorder.into(weight_grads):
            if self._autocast is None:  # a context that does nothing would cost more than asking
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
        """B: all gradients. Returns the input's, None for the first stage.

        Parameters
        ----------
        grad_output
            The gradient of the output; None for the last stage, whose output is the loss.
        """
        held = self._forwards.pop(microbatch)
        grad_input = self._backpropagate(held, grad_output)
        if held.weight_grads is not None:
            held.weight_grads.run()
        return grad_input

    def backward_input(self, microbatch: int, grad_output: Tensor | None) -> Tensor | None:
        """I: the input's gradient, None for the first stage; queues the weights' for W."""
        held = self._forwards.pop(microbatch)
        # Not `or`: at this point the queue is empty, and an empty one is false.
        queue = held.weight_grads if held.weight_grads is not None else WeightGrads()
        self._weight_grads[microbatch] = queue
        grad_input = self._backpropagate(held, grad_output)
        if self._queued is None:
            self._queued = queue.parameters()
        return grad_input

    def backward_weight(self, microbatch: int) -> None:
        """W: the queued weight gradients, accumulated into ``.grad``."""
        self._weight_grads.pop(microbatch).run()

    @property
    def split_share(self) -> SplitShare | None:
        """How much W computes, as the first I left it; None before that, and without trainable parameters."""
        return None if self._queued is None else SplitShare.of(self.module, self._queued)

    def _forward_to_recompute(
        self, microbatch: int, x: Tensor, target: Tensor | None, weight_grads: WeightGrads | None
    ) -> Tensor:
        if any(has_hooks(parameter) for parameter in self._shared):
            # Its backward is run layer by layer: a hook would be called once per layer, with a part each.
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
        """What is recomputed one after the other; the loss together with the layer before it."""
        segments: list[Segment] = [self._checked(layer) for layer in self._layers]
        if self._loss is None:
            return segments
        # Else the layer's output would be kept from F on: with a large vocabulary, the most of all.
        last = segments.pop()
        return [*segments, lambda x: self._with_loss(last(x), target)]

    def _checked(self, layer: nn.Module) -> Segment:
        def run(x: Tensor) -> Tensor:
            version = x._version
            output = checked_output(self.index, layer(x))
            # Without a graph autograd would not notice, and what is computed again would be something else.
            if x._version != version:
                raise ModelError(
                    f"stage {self.index}: a {type(layer).__name__} wrote to its input, from which a "
                    f"recomputed layer is computed again. Let it write elsewhere (no inplace=True on a "
                    f"layer's input), or plan without recomputing it."
                )
            return output

        return run

    def _computing(self, x: Tensor) -> AbstractContextManager[object]:
        """The context of a forward."""
        return nullcontext() if self._autocast is None else torch.autocast(x.device.type, self._autocast)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it the modules are in evaluation mode; afterwards each is in the mode that it was in."""
        before = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for module, mode in before:  # not train(): some may be in evaluation mode on purpose
                module.training = mode

    def evaluate(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """F that leaves nothing behind: the output, of the last stage the loss."""
        with torch.no_grad(), torch.autocast(input.device.type, self._autocast, self._autocast is not None):
            output = self._computed(input.detach(), target).detach()
        self._weigh()
        return output

    def take_weight(self) -> float:
        """The weights of all microbatches whose F was run since the last call, added up; waits for a GPU."""
        weight, self._weight = float(self._weight), 0.0
        return weight

    def _weigh(self) -> None:
        """Add the weight of the F that has just been run; an F that is computed again does not count."""
        if self._is_weighted:
            self._weight = self._weight + self._last_weight

    @property
    def held(self) -> tuple[set[int], set[int]]:
        """Microbatches between F and I or B, and microbatches between I and W."""
        return set(self._forwards), set(self._weight_grads)

    def _loss_seed(self, loss: Tensor) -> Tensor:
        """The gradient that the loss is given; autograd only reads it, so microbatches share it."""
        value = self.loss_scale * self._share
        known = self._seed
        if known is None or known[0] != value or known[1].dtype is not loss.dtype:
            known = self._seed = (value, torch.full_like(loss, value, requires_grad=False))
        return known[1]

    def _computed(self, x: Tensor, target: Tensor | None) -> Tensor:
        """The module's output, of the last stage the loss."""
        if not self._layers:
            self._require_float(x)
        output = checked_output(self.index, self.module(x))
        return output if self._loss is None else self._with_loss(output, target)

    def _require_float(self, x: Tensor) -> None:
        """Data of another type, as an empty first stage would pass it on, has no gradient to come back."""
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
        loss = self._loss(output, target)
        if not self._is_weighted:
            return checked_loss(loss)
        total, weight = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
        if not isinstance(weight, Tensor | int | float) or (
            isinstance(weight, Tensor) and weight.numel() != 1
        ):
            raise ModelError(f"loss_sum returned {_shown(weight)} as a weight; it must return (sum, weight).")
        # In float64: float32 counts to 16 million only.
        self._last_weight = weight.detach().double() if isinstance(weight, Tensor) else float(weight)
        return checked_loss(total)

    def _backpropagate(self, held: _Forward, grad_output: Tensor | None) -> Tensor | None:
        gradient = held.loss_seed if grad_output is None else grad_output
        # A stage without trainable parameters before its first use of the input has nothing to propagate.
        if isinstance(held.output, Recomputed):
            with self._recorder.into(held.weight_grads):
                grad_input = held.output.backward(gradient, needs_input_grad=not self._is_first)
        else:
            if held.output is not None:
                with self._recorder.into(held.weight_grads):  # for forwards that checkpointing runs again
                    torch.autograd.backward(held.output, gradient)
            grad_input, held.input.grad = held.input.grad, None
        if self._is_first:
            return None
        return torch.zeros_like(held.input) if grad_input is None else grad_input


def _parameters_of_several(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trainable parameters that more than one of these layers have."""
    users = Counter(parameter for layer in layers for parameter in layer.parameters())
    return [parameter for parameter, count in users.items() if count > 1 and parameter.requires_grad]


def checked_output(index: int, output: object) -> Tensor:
    """What a stage's module returned, if it is what it must be; raises :class:`ModelError`."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ModelError(
            f"stage {index} returned {_shown(output)}; a stage must return one floating-point tensor. Pack "
            f"several into one, or compute them again in the next stage."
        )
    return output


def checked_loss(loss: object) -> Tensor:
    """What a loss returned, if it is what it must be; raises :class:`ModelError`."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        of_several = f" of {loss.numel()} numbers" if isinstance(loss, Tensor) else ""
        raise ModelError(
            f"the loss returned {_shown(loss)}{of_several}; it must be one floating-point number, the mean "
            f"over a microbatch. Where microbatches count differently, give the model a loss_sum."
        )
    return loss


def _shown(output: object) -> str:
    return f"a {output.dtype} tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"
