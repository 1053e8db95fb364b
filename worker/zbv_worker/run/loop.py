"""One rank's run of one plan, as a loop over steps of its stages (:class:`~.trained_stages.TrainedStages`).

To a step it adds the update, and between steps checkpoints, evaluations, changes of plan, and reports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbv_worker.checkpoints.checkpoint import Checkpoints
from zbv_worker.checkpoints.checkpoint_state import TrainedState
from zbv_worker.errors import ModelError, naming_errors
from zbv_worker.execution.agreement import agree_on_keywords
from zbv_worker.execution.binding import keywords_of
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import ExecutorOptions
from zbv_worker.execution.fetch_ahead import fetched_ahead
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.stated_shapes import stated_structures
from zbv_worker.execution.timeline import Launched
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.gradients.fully_sharded import dividing
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.model.protocol import Evaluated, Microbatch, PipelineModel, StatefulData, Tied, Weighted
from zbv_worker.pipeline.preparing import open_channels
from zbv_worker.pipeline.trained_stages import TrainedStages, seed_generators
from zbv_worker.run.options import RunOptions, require_compilable
from zbv_worker.run.plan_change import Swaps
from zbv_worker.run.reporting import Reporting, warn_of_another_program
from zbv_worker.run.update import Update
from zbv_worker.tracing.report import RankReport, StepLine
from zbv_worker.transport.channels import Transport
from zbv_worker.values.structure import Structure

_OF_UPDATE = 4
"""How many numbers :meth:`Update.settle` takes."""


class Loop:
    """A plan's run on this rank. All ranks create theirs, and call its methods, in the same order.

    Parameters
    ----------
    progress
        Updated with every action.
    label
        Prefix of the lines printed for each step.

    Attributes
    ----------
    first_step
        The first step to run: 0, or the step of the newest checkpoint.

    Raises
    ------
    InvalidRun, Disagreement, ModelError
        Before anything was trained.
    """

    def __init__(
        self,
        options: RunOptions,
        plan: RankPlan,
        model: PipelineModel,
        transport: Transport,
        device: torch.device,
        progress: CurrentProgress | None = None,
        label: str = "",
    ):
        self._run, self._training, self._model = options, options.training, model
        self._transport, self._device = transport, device
        self._timeout, self._patience = options.timeout, options.startup_patience
        self._launched: list[Launched] = []
        loss_scale = LossScale.of(self._training.precision)
        self._stages = self._build(plan, self._agree(plan), progress)
        self._update = Update(
            model,
            self._stages.gradients,
            transport,
            loss_scale,
            self._training.clip_norm,
            self._training.non_finite,
            device,
            names={parameter: name for name, parameter in self._stages.ties.named_parameters()},
            is_late=self._stages.executor.is_late,
        )
        seed_generators(options.model.seed, transport)
        self._checkpoints = self._make_checkpoints()
        self.first_step = 0 if self._checkpoints is None else self._checkpoints.load_newest()
        self._reporting = Reporting(plan, transport, self._training.trace_dir, label, self._timeout)
        expected = {index: stage.expected_share for index, stage in self._stages.stages.items()}
        self._reporting.unsplit(self.first_step, expected)
        self._swaps: Swaps | None = None
        if self._training.next_plan:
            is_late = self._stages.executor.is_late
            self._swaps = Swaps(transport, self._training.next_plan, plan, is_late=is_late)

    def step(self, step: int) -> None:
        """Run one step: the plan, once or several times, and the optimizer.

        Before it, do the evaluation, checkpoint or change of plan that is due. On a GPU the step's numbers
        are reported, and raise errors, while the next step is launched.
        """
        self._evaluate_and_save(step)
        self._change_plan(step)
        for stage in self._stages.stages.values():
            stage.loss_scale = self._update.loss_scale.value
        self._stages.check_ties(f"step {step}", is_first=step == self.first_step)
        self._stages.gradients.begin()
        launched = self._stages.launch(step, self._settle)
        with naming_errors(self._transport.rank, f"after step {step}"):
            self._require_mean()
            loss, factor = self._stages.finish(launched)
            numbers = self._update.launch(self._timeout, loss, factor)
            auxiliary = self._stages.batch_loss.auxiliary
            replicas = self._transport.layout.replicas
            launched[-1].end(numbers if auxiliary is None else [*numbers, auxiliary * replicas])
        self._launched = launched
        if self._update.must_wait:
            self._settle()

    @property
    def report(self) -> RankReport:
        """The results so far."""
        return self._reporting.report

    def end(self) -> None:
        """After the last step, report it, run the evaluation, and write the checkpoint and trace due."""
        self._settle()
        self._evaluate_and_save(self._run.steps)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._reporting.update_trace(is_last=True)

    def close(self) -> None:
        """Stop background threads."""
        self._stages.executor.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._swaps is not None:
            self._swaps.close()

    def _agree(self, plan: RankPlan) -> list[Structure]:
        """Check that all ranks have the same plan, and open its channels; returns the stated shapes."""
        stated = [*stated_structures(getattr(self._model, "shape_of", None), plan.features)]
        open_channels(
            plan,
            self._transport,
            model=self._run.model.fingerprint(plan.placement.n_stages, plan.cut.partition),
            backend=self._run.backend,
            patience=self._patience,
            steps=self._run.steps,
            is_traced=self._run.trace is not None,
            stated=stated,
            options=self._training.common,
        )
        return stated

    def _build(
        self, plan: RankPlan, stated: list[Structure], progress: CurrentProgress | None
    ) -> TrainedStages:
        training, model, transport, device = self._training, self._model, self._transport, self._device
        require_compilable(training)
        stages = build_stages(
            model,
            plan,
            device,
            replicas=training.replicas * training.parts,  # the loss is a mean over all their microbatches
            program=training.program,
            divide=dividing(transport, device) if training.is_sharded else None,
        )
        with naming_errors(transport.rank, "agreeing on the layers' keywords"):
            keywords = agree_on_keywords(transport, keywords_of(stages.values()), self._patience)
        last = self._run.steps * training.parts - 1
        return TrainedStages(
            plan,
            stages,
            DataOfReplica(
                model, plan.microbatches, transport.replica, transport.layout.replicas, training.parts
            ),
            transport,
            device,
            ExecutorOptions(
                look_ahead=self._run.receives_ahead,
                progress=progress,
                startup_timeout=self._run.startup_timeout,
                fetch_ahead=fetched_ahead(model, device),
                last_step=None if isinstance(model, StatefulData) else last,
                parts=training.parts,
                keywords=keywords,
                stated=stated,
            ),
            program=training.program,
            timeout=self._timeout,
            patience=self._patience,
            tied=model.tied_parameters() if isinstance(model, Tied) else (),
            is_weighted=isinstance(model, Weighted),
        )

    def _make_checkpoints(self) -> Checkpoints | None:
        if self._training.checkpoint is None:
            return None
        update = self._update
        trained = TrainedState(
            self._stages.modules,
            self._run.model.fingerprint(0),
            [] if update.optimizer is None else [update.optimizer],
            [] if update.schedule is None else [update.schedule],
            update.loss_scale,
            self._model,
            self._stages.ties,
        )
        return Checkpoints(
            self._training.checkpoint,
            trained,
            self._transport,
            self._device,
            lambda step, why: self._reporting.checkpoint_skipped(step, why),
        )

    def _settle(self) -> None:
        """Report the newest step, once it is complete on the device; does nothing if that has been done."""
        launched, self._launched = self._launched, []
        if not launched:
            return
        step, results = launched[-1].step, [run.result() for run in launched]
        newest, seconds = results[-1], sum(result.seconds for result in results)
        (loss, *_), auxiliary = newest.numbers, newest.numbers[_OF_UPDATE:]
        updated = self._update.settle(newest.numbers[:_OF_UPDATE])
        line = StepLine(
            step,
            self._stages.plan.plan_id,
            loss if launched[-1].losses else None,
            seconds,
            newest.update_seconds,
            updated,
            auxiliary[0] if auxiliary else None,
        )
        self._reporting.step(line, newest)
        if step == self.first_step:
            self._reporting.unsplit(step, self._stages.split_shares)
        self._reporting.update_trace()

    def _evaluate_and_save(self, step: int) -> None:
        """Run the evaluation and the checkpoint due before a step, or after the last one."""
        every = self._training.evaluate_every
        if every is not None and step % every == 0:
            self._settle()
            self._evaluate(step)
        if self._checkpoints is not None:
            self._checkpoints.check()
            if self._checkpoints.is_due(step, self._run.steps):
                self._settle()  # it may fail because of values that are not finite, which must not be saved
                self._checkpoints.save(step)

    def _evaluate(self, step: int) -> None:
        what = f"evaluating before step {step}"
        self._stages.check_ties(what, is_first=step == self.first_step)
        with naming_errors(self._transport.rank, what):
            mean = self._stages.evaluate(step, self._require_mean)
        self._reporting.evaluation(step, None if mean is None else float(mean))

    def _require_mean(self) -> None:
        """Refuse a loss with weights if the model does not say that it has one."""
        stages = self._stages.stages.values()
        if not self._stages.batch_loss.is_weighted and any(stage.is_weighted for stage in stages):
            raise ModelError(
                f"loss of a {type(self._model).__name__} returned a pair of sum and weight; must be the "
                f"mean over a microbatch. Rename the method to loss_sum, and let loss return the mean."
            )

    def _change_plan(self, step: int) -> None:
        """Change to another plan if one was announced for this step."""
        if self._swaps is None:
            return
        with naming_errors(self._transport.rank, f"before step {step}"):
            plan = self._swaps.before(step)
            if plan is None:
                return
            self._settle()
            self._transport.flush(self._timeout)
        self._stages.change(plan, self._agree(plan))
        self._reporting.plan_changed(step, plan)
        if self._transport.rank == 0:
            warn_of_another_program(plan, self._training.program, self._device)
        self._reporting.unsplit(step, self._stages.split_shares)


class DataOfReplica:
    """A replica's share of a step's microbatches.

    A step has N parts, each a run of the plan with m microbatches on each of R replicas. In part e, replica d
    has the microbatches from (e·R + d)·m on. So N parts, or N replicas, train on the same microbatches as one
    pipeline with as many.

    Parameters
    ----------
    microbatches
        m.
    parts
        N.
    """

    def __init__(
        self, model: PipelineModel, microbatches: int, replica: int, replicas: int = 1, parts: int = 1
    ):
        self._model = model
        self._first = replica * microbatches
        self._of_part = replicas * microbatches
        self._parts = parts

    def microbatch(self, number: int, index: int) -> Microbatch | tuple[Any, ...]:
        """A microbatch of a run of the plan; ``number`` counts the runs before it."""
        step, part = divmod(number, self._parts)
        found = self._model.microbatch(step, part * self._of_part + self._first + index)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(found)):
            raise ModelError(
                "microbatch returned a tensor that requires a gradient, which a run does not compute. Detach "
                "it, or make the module that computes it the first layer."
            )
        return found

    def evaluation_microbatch(self, step: int, index: int) -> Microbatch | tuple[Any, ...]:
        """A microbatch of an evaluation before a step, of the evaluation data if the model has such data."""
        if isinstance(self._model, Evaluated):
            return self._model.evaluation_microbatch(step, self._first + index)
        return self._model.microbatch(step, self._first + index)
