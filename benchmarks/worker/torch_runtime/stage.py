"""A stage for PyTorch's pipelining runtime that splits the backward with the worker's weight-grad store.

PyTorch's own split would skip stage 0's I, run its whole backward in W, and hold more after I than after F.
With a ``dw_builder``, its stages run the plain backward in I and the builder's result in W. Here that result
runs the queue of :mod:`zbv_worker.stage.split_backward`, as in :mod:`zbv_worker.stage.stage`.

Two more things differ from PyTorch's stage:

- PyTorch keeps a receive buffer per microbatch and direction, m activations and m gradients, from the first
  step on. Here a buffer exists only from its receive to the end of the backward that uses it.
- Outputs and the buffers that receive them are made contiguous: transports require it, and a gradient's
  layout during shape inference may differ from its layout later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from zbv_worker.errors import InvalidRun
from zbv_worker.stage.split_backward import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.values.structure import is_plain


class StoreStage(PipelineStage):
    """One stage and the queues of its microbatches.

    Parameters
    ----------
    split
        Microbatches with a backward of I and W; the others have B.
    on_start
        Called when an action has its input and begins to compute, with the bytes of its input that came from
        another rank.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        n_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        split: frozenset[int],
        on_start: Callable[[int], None],
    ):
        super().__init__(module, index, n_stages, device, group=group, dw_builder=self._take_queue)
        self._recorder = defer_weight_gradients(module)
        self._split = split
        self._on_start = on_start
        self._queues: dict[int, WeightGrads | None] = {}
        self._current: WeightGrads | None = None

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run F; if its backward will be split, register the microbatch's queue."""
        self._on_start(self._received(self.stage_index - 1, self.args_recv_info[fwd_chunk_id]))
        queue = WeightGrads() if fwd_chunk_id in self._split else None
        self._queues[fwd_chunk_id] = queue
        with self._recorder.into(queue):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run I or B; releases the microbatch's buffers."""
        self._on_start(self._received(self.stage_index + 1, self.grad_recv_info[bwd_chunk_id]))
        self._current = self._queues.pop(bwd_chunk_id)
        with self._recorder.into(self._current):  # checkpointing may run forwards again
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run W, the queue."""
        self._on_start(0)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of an activation, with new buffers."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a gradient, with new buffers."""
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take a gradient from the next stage on this rank; zeros if that stage has none."""
        infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._allocate(info for info, gradient in infos if gradient is None)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's output, checked and contiguous."""
        compute: Callable[..., object] = super().forward_maybe_with_nosync  # torch does not type it
        return self._output(compute(*args, **kwargs))

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Tensor:
        # The runtime's shape inference calls this instead of forward_one_chunk.
        return self._output(super()._compute_outputs(*args, module=module, **kwargs))

    def _output(self, output: Any) -> Tensor:
        if not (isinstance(output, Tensor) and is_plain(output)):
            raise InvalidRun(
                f"stage {self.stage_index} returned a {type(output).__name__}; for PyTorch's runtime it "
                f"must be one floating-point tensor."
            )
        return output.contiguous()

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info = _without_buffers(self.args_recv_info[0], num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info = _without_buffers(self.grad_recv_info[0], num_microbatches)

    def _allocate(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def _received(self, source: int, infos: Iterable[Any]) -> int:
        if not 0 <= source < self.num_stages or self._is_same_rank(source):
            return 0
        return sum(info.buffer.nbytes for info in infos if info.buffer is not None)

    def _take_queue(self) -> Callable[[], None]:
        """Return the function that PyTorch calls in W, or at once for B."""
        queue, self._current = self._current, None
        # A fused backward has computed all weight gradients, so its W does nothing.
        return queue.run if queue is not None else lambda: None


def _without_buffers(infos: tuple[Any, ...], microbatches: int) -> dict[int, tuple[Any, ...]]:
    """Descriptions of every microbatch's receives, copied from those of one."""
    for info in infos:
        info.buffer = None
    return {microbatch: tuple(map(copy.copy, infos)) for microbatch in range(microbatches)}
