"""The stages of one rank in training: the executor of its list, their gradients, and the loss of the batch.

A :class:`~.pipeline.Pipeline` in the user's loop and ``zbv-worker run`` (:mod:`zbv_worker.run`) both train
through it. What they add is where the batches come from, and what happens to complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zbv_worker.errors import naming_errors
from zbv_worker.execution.binding import Batches
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import Launched
from zbv_worker.gradients.batch_loss import BatchLoss
from zbv_worker.gradients.gradients import Gradients, gradients_of
from zbv_worker.gradients.ties import Ties
from zbv_worker.model.loss_module import require_known_parameters
from zbv_worker.stage.program import Program
from zbv_worker.stage.split_share import SplitShare
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import Transport
from zbv_worker.values.structure import Structure


class TrainedStages:
    """The stages of one rank. All ranks make theirs, and call its methods, in the same order.

    Parameters
    ----------
    tied
        Pairs of names of parameters that are one parameter.
    timeout, patience
        Seconds to wait for other ranks, and the same in the first step.
    is_weighted
        Whether the loss has weights; None if the first step shows it.

    Attributes
    ----------
    gradients
        Those of the parameters that are trained now; replaced if the user trains others.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        batches: Batches,
        transport: Transport,
        device: torch.device,
        options: ExecutorOptions,
        *,
        program: Program,
        timeout: float,
        patience: float,
        tied: Sequence[tuple[str, str]] = (),
        is_weighted: bool | None = None,
    ):
        self.plan, self.stages, self.device = plan, stages, device
        self.modules = {index: stage.module for index, stage in stages.items()}
        self._batches, self._transport, self._program = batches, transport, program
        self._timeout, self._patience = timeout, patience
        self._is_last_part = True
        for stage in stages.values():
            stage.check_graph = partial(require_known_parameters, self.modules)
        with naming_errors(transport.rank, "connecting ranks with tied parameters"):
            self.ties = Ties(tied, self.modules, transport, patience)
        self.has_ties = bool(self.ties)
        self.gradients = self.make_gradients()
        self.batch_loss = BatchLoss(
            stages.values(), plan.microbatches, transport, device, timeout, is_weighted=is_weighted
        )
        self._options = replace(
            options,
            on_stage_done=self._stage_done,
            # The first microbatch runs uncompiled, so of one microbatch the second step compiles.
            startup_steps=2 if program.is_compiled and plan.microbatches == 1 else 1,
        )
        self.executor = self._executor_of(plan)

    def make_gradients(self) -> Gradients:
        """The gradients of the parameters that require them now. Collective with replicas."""
        return gradients_of(
            self.modules, self._transport, has_main=self._program.has_main_gradients, ties=self.ties
        )

    def change(self, plan: RankPlan, stated: Sequence[Structure]) -> None:
        """Run another plan of the same stages from the next step on; its channels are open."""
        self.executor.close()
        self.plan = plan
        self._options = replace(self._options, stated=stated)
        for index, stage in self.stages.items():
            stage.is_recomputed = plan.cut.recomputes(index)
        self.executor = self._executor_of(plan)

    def check_ties(self, what: str, *, is_first: bool) -> None:
        """Require that copies of tied parameters are equal; see :meth:`Ties.check`. Collective."""
        if not self.has_ties:
            return
        with naming_errors(self._transport.rank, f"{what}, comparing copies of tied parameters"):
            self.ties.check(self._patience if is_first else self._timeout)

    def launch(self, step: int, then: Callable[[], None] | None = None) -> list[Launched]:
        """Run the list as often as a step does, which a GPU may not have completed afterwards.

        Parameters
        ----------
        then
            Called after each run: the executor has seen the end of the step before.
        """
        launched = []
        for part in range(self._options.parts):
            self._is_last_part = part == self._options.parts - 1
            launched.append(self.executor.launch(step, part))
            if then is not None:
                then()
        return launched

    def finish(self, launched: Sequence[Launched]) -> tuple[Tensor | None, Tensor | float]:
        """Wait until the gradients are complete. Collective.

        Returns the loss, a float64 scalar, on ranks with the last stage, and the factor that the gradients
        still need.
        """
        self.gradients.finish(self._timeout)
        losses = [loss for run in launched for loss in run.losses.values()]
        return self.batch_loss.of(losses, self._options.parts)

    def evaluate(
        self, step: int, then: Callable[[], None] = lambda: None, *, has_loss: bool = True
    ) -> Tensor | None:
        """Run only the forwards; returns the loss on ranks with the last stage. Collective.

        Parameters
        ----------
        then
            Called before the loss is averaged over replicas.
        has_loss
            Whether there is a loss; otherwise the result is None.
        """
        losses = self.executor.evaluate(step)
        self.gradients.free_parameters()
        then()
        values = torch.tensor([*losses.values()], dtype=torch.float64, device=self.device)
        return self.batch_loss.of(values.unbind())[0] if has_loss else None

    @property
    def split_shares(self) -> dict[int, SplitShare | None]:
        """By stage, how much of the backward W computes."""
        return {index: stage.split_share for index, stage in self.stages.items()}

    def _stage_done(self, stage: int) -> None:
        """Let a stage's gradients be summed once the last run of the list in a step has added to them."""
        if self._is_last_part:
            self.gradients.stage_done(stage)

    def _executor_of(self, plan: RankPlan) -> Executor:
        return Executor(
            plan,
            self.stages,
            self._batches,
            self._transport,
            device=self.device,
            timeout=self._timeout,
            options=self._options,
        )
