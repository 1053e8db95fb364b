"""The stages of one rank in training: the executor of its list, their gradients, and the loss of the batch.

The loss is a mean over microbatches, or over weights, and over replicas of the pipeline. Each replica also
needs other random numbers.

A :class:`~.pipeline.Pipeline` in the user's loop and ``zbv-worker run`` (:mod:`zbv_worker.run`) both train
through it. What they add is where the batches come from, and what happens to complete gradients.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from zbv_worker.errors import ModelError, naming_errors
from zbv_worker.execution.binding import Batches
from zbv_worker.execution.build_stages import note_training
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import Launched
from zbv_worker.gradients.buckets import gradients_of
from zbv_worker.gradients.gradients import Gradients
from zbv_worker.gradients.ties import Ties
from zbv_worker.model.loss_module import require_known_parameters
from zbv_worker.stage.program import Program
from zbv_worker.stage.recorder import SplitShare
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
        self._skips: bool | None = None
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

    def _agree_on_gradients(self, *, of_batch: bool) -> None:
        """Tell every stage whether anything below it trains. Collective."""
        with naming_errors(self._transport.rank, "comparing which stages train"):
            self._skips = note_training(
                self.stages.values(),
                self.plan.placement.n_stages,
                self._transport,
                self._patience if self._skips is None else self._timeout,
                of_batch=of_batch,
            )

    def launch(
        self,
        step: int,
        then: Callable[[], None] | None = None,
        *,
        of_batch: Callable[[], bool] = lambda: False,
    ) -> list[Launched]:
        """Run the list as often as a step does, which a GPU may not have completed afterwards. Collective.

        Parameters
        ----------
        then
            Called after each run: the executor has seen the end of the step before.
        of_batch
            Says, on the first stage's rank, whether its input needs a gradient.
        """
        if self._skips is not False:
            # Again in every step while a stage computes no gradient of its input: a user may unfreeze layers
            # below, which other ranks do not see.
            self._agree_on_gradients(of_batch=of_batch())
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


class BatchLoss:
    """Combines losses over microbatches, replicas and, if they have weights, over these.

    Whether a plain function returns weights is known on ranks with the last stage, after its first call. All
    ranks learn it in the first step or evaluation. From then on, only losses with weights need a sum over the
    ranks.

    Parameters
    ----------
    microbatches
        The number of microbatches of one replica; gradients are divided by that of all replicas.
    is_weighted
        Whether the loss has weights; None if it is not known.

    Attributes
    ----------
    is_weighted
        As the parameter, and known after the first step.
    must_repeat
        Whether the first step must run again: its auxiliary losses were not weighted.
    auxiliary
        The sum of the auxiliary losses of this rank's stages in the newest step, averaged like the loss.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        microbatches: int,
        transport: Transport,
        device: torch.device,
        timeout: float,
        *,
        is_weighted: bool | None = None,
    ):
        self._stages = tuple(stages)
        self._objectives = [stage.objective for stage in self._stages if stage.objective is not None]
        self._count = microbatches * transport.layout.replicas
        self._transport = transport
        self._device = device
        self._timeout = timeout
        self.is_weighted = is_weighted
        self.must_repeat = False
        self.auxiliary: Tensor | None = None

    def of(self, losses: Collection[Tensor], parts: int = 1) -> tuple[Tensor | None, Tensor | float]:
        """The batch's loss on ranks that have losses, and the factor of the step's gradients. Collective.

        The loss is a float64 scalar.

        Parameters
        ----------
        parts
            How many times as many microbatches as usual the batch has; its gradients are already divided by
            their number.

        Raises
        ------
        TimeoutError, ConnectionError
            If a rank does not take part.
        ModelError
            If the loss has weights now, and had none in the first step, or has none and the microbatches
            need them.
        """
        for objective in self._objectives:
            objective.require_equal_sizes()
        mean = None
        if losses:
            mean = torch.cat([loss.detach().reshape(1) for loss in losses]).double().sum() / len(losses)
        if self._transport.layout.replicas > 1:
            mean = mean_over_replicas(self._transport, mean, self._timeout, self._device)
        factor: Tensor | float = 1.0
        count = self._count * parts
        auxiliary = sum(stage.auxiliary.take_sum() for stage in self._stages)
        self.must_repeat = False
        if self.is_weighted is not False:
            weight = self._weight(has_auxiliary=isinstance(auxiliary, Tensor))
            if self.is_weighted:
                # If all weights are 0, there is nothing to learn from, and the mean is undefined.
                factor = torch.where(weight > 0, count / weight, 0.0)
                mean = None if mean is None else torch.where(weight > 0, mean * factor, math.nan)
        elif any(objective.is_weighted for objective in self._objectives):
            raise ModelError(
                "the loss returned a pair, and one number in the first step; it must return the same kind "
                "in every step. Return (loss, 1.0) for a mean."
            )
        self.auxiliary = auxiliary * factor / count if isinstance(auxiliary, Tensor) else None
        return mean, factor

    def _weight(self, *, has_auxiliary: bool) -> Tensor:
        """The sum of the weights of all replicas; in the first step, also learn whether there are weights."""
        mine = torch.zeros(3, dtype=torch.float64, device=self._device)
        for stage in self._stages:
            mine[0].add_(stage.take_weight())
            mine[1].add_(float(stage.is_weighted))
        mine[2].add_(float(has_auxiliary))
        found = self._transport.sum_over_ranks(mine, self._timeout)
        if self.is_weighted is None:
            _, weighted, auxiliary = found.tolist()
            self.is_weighted = weighted > 0
            self.must_repeat = self.is_weighted and auxiliary > 0
            for stage in self._stages:
                stage.is_weighted = self.is_weighted
        return found[0] / self._transport.layout.inner  # the inner ranks of a replica have the same weights


def mean_over_replicas(
    transport: Transport, value: Tensor | None, timeout: float, device: torch.device
) -> Tensor | None:
    """The mean of a scalar over several replicas of a position; None if they have none.

    Collective even without a number, so that no replica ends a step before all have begun it (see
    :mod:`zbv_worker.run.plan_change`).
    """
    replicas = transport.layout.replicas
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
    digest = hashlib.sha256(f"{seed}/{place_of(transport)}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))
    random.seed(digest)


@contextmanager
def numbers_of_place(place: int, device: torch.device, *, advances: bool) -> Iterator[None]:
    """A context in which torch's random numbers are those of this rank's position and replica.

    They follow from the caller's generator, so ``torch.manual_seed`` and a restored state count. After the
    context, the caller has the state of before: ranks that were seeded alike still shuffle data alike.

    Parameters
    ----------
    place
        See :func:`place_of`.
    advances
        Whether the caller's generator then advances by one number, so that the next context has other ones.
    """
    cuda = device if device.type == "cuda" else None
    before = torch.get_rng_state()
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    state = torch.get_rng_state() if advances else before
    of_device = None if cuda is None else torch.cuda.get_rng_state(cuda)
    seed = int.from_bytes(hashlib.sha256(f"{drawn}/{place}".encode()).digest()[:7])
    torch.default_generator.manual_seed(seed)
    if cuda is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)


def place_of(transport: Transport) -> int:
    """A number of this rank's position and replica; the inner ranks of a replica have the same."""
    return transport.pp_rank * transport.layout.replicas + transport.replica
