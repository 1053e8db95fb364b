"""One rank's training of one plan: stages, gradients, update, checkpoints, evaluation, changes of plan."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from zbv_worker.checkpoints.checkpoint import Checkpoints
from zbv_worker.checkpoints.checkpoint_state import TrainedState
from zbv_worker.errors import ModelError, naming_errors
from zbv_worker.execution.agreement import Statement, agree, agree_on_keywords
from zbv_worker.execution.binding import keywords_of
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.fetch_ahead import fetched_ahead
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.stated_shapes import digest_of, stated_structures
from zbv_worker.execution.step import Launched
from zbv_worker.gradients.batch_loss import BatchLoss
from zbv_worker.gradients.gradients import gradients_of
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.gradients.replicas import DataOfReplica, seed_generators
from zbv_worker.gradients.sharding import dividing
from zbv_worker.gradients.ties import Ties
from zbv_worker.model.loss_module import require_known_parameters
from zbv_worker.model.protocol import PipelineModel, StatefulData, Tied, Weighted
from zbv_worker.run.options import (
    Setting,
    require_compilable,
)
from zbv_worker.run.plan_change import Swaps
from zbv_worker.run.reporting import Reporting, warn_of_another_program
from zbv_worker.run.update import Update
from zbv_worker.stage.split_share import SplitShare
from zbv_worker.stage.stage import Stage
from zbv_worker.tracing.report import RankReport, StepLine

_OF_UPDATE = 4
"""How many numbers :meth:`Update.settle` takes."""


class Training:
    """A plan's training on this rank. All ranks create theirs, and call its methods, in the same order.

    Parameters
    ----------
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
        setting: Setting,
        plan: RankPlan,
        model: PipelineModel,
        label: str = "",
    ):
        self._setting = setting
        self._transport = setting.transport
        self._rank = setting.transport.rank
        self._timeout = setting.run.timeout
        self._options = options = setting.run.training
        self._plan = plan
        self._model = model
        self._stages: dict[int, Stage] = {}
        self._launched: list[Launched] = []
        self._is_last_part = True
        self._executor: Executor
        self._loss_scale = LossScale.of(options.precision)
        self._agree()
        modules = self._build()
        pairs = model.tied_parameters() if isinstance(model, Tied) else ()
        with naming_errors(self._rank, "connecting ranks with tied parameters"):
            self._ties = Ties(pairs, modules, setting.transport, setting.run.startup_patience)
        with naming_errors(self._rank, "agreeing on the layers' keywords"):
            taken = keywords_of(self._stages.values())
            self._keywords = agree_on_keywords(self._transport, taken, setting.run.startup_patience)
        self._gradients = gradients_of(
            modules, self._transport, has_main=options.has_main_gradients, ties=self._ties
        )
        self._batch_loss = BatchLoss(
            self._stages.values(),
            plan.microbatches,
            setting.transport,
            setting.device,
            self._timeout,
            is_weighted=isinstance(model, Weighted),
        )
        self._walk()
        transport = setting.transport
        self._update = Update(
            model,
            self._gradients,
            transport,
            self._loss_scale,
            options.clip_norm,
            options.non_finite,
            setting.device,
            names={parameter: name for name, parameter in self._ties.named_parameters()},
            is_late=self._executor.is_late,
        )
        seed_generators(setting.run.model.seed, transport)
        self._checkpoints = self._make_checkpoints(modules)
        self.first_step = 0 if self._checkpoints is None else self._checkpoints.load_newest()
        self._reporting = Reporting(plan, transport, options.trace_dir, label, self._timeout)
        expected = {index: stage.expected_share for index, stage in self._stages.items()}
        self._reporting.unsplit(self.first_step, expected)
        self._swaps = (
            Swaps(transport, options.next_plan, plan, is_late=self._executor.is_late)
            if options.next_plan
            else None
        )

    def step(self, step: int) -> None:
        """Run one step: the plan, once or several times, and the optimizer.

        Before it, do the evaluation, checkpoint or change of plan that is due.

        On a GPU the step's numbers are reported, and raise errors, while the next step is launched.
        """
        self._evaluate_and_save(step)
        self._change_plan(step)
        for stage in self._stages.values():
            stage.loss_scale = self._loss_scale.value
        self._check_ties(step, f"step {step}")
        self._gradients.begin()
        launched = []
        for part in range(self._options.parts):
            self._is_last_part = part == self._options.parts - 1
            launched.append(self._executor.launch(step, part))
            self._settle()  # the step before: the executor has seen its end
        losses = [loss for each in launched for loss in each.losses.values()]
        with naming_errors(self._rank, f"after step {step}"):
            self._gradients.finish(self._timeout)
            self._require_mean()
            loss, factor = self._batch_loss.of(losses, self._options.parts)
            numbers = self._update.launch(self._timeout, loss, factor)
            auxiliary = self._batch_loss.auxiliary
            replicas = self._transport.layout.replicas
            launched[-1].end(numbers if auxiliary is None else [*numbers, auxiliary * replicas])
        self._launched = launched
        if self._update.must_wait:
            self._settle()

    def _stage_done(self, stage: int) -> None:
        """Let a stage's gradients be summed once the last run of the plan in a step has added to them."""
        if self._is_last_part:
            self._gradients.stage_done(stage)

    def _settle(self) -> None:
        """Report the newest step, once it is complete on the device; does nothing if that has been done."""
        launched, self._launched = self._launched, []
        if not launched:
            return
        step, results = launched[-1].step, [each.result() for each in launched]
        newest, seconds = results[-1], sum(each.seconds for each in results)
        (loss, *_), auxiliary = newest.numbers, newest.numbers[_OF_UPDATE:]
        updated = self._update.settle(newest.numbers[:_OF_UPDATE])
        line = StepLine(
            step,
            self._plan.plan_id,
            loss if launched[-1].losses else None,
            seconds,
            newest.update_seconds,
            updated,
            auxiliary[0] if auxiliary else None,
        )
        self._reporting.step(line, newest)
        if step == self.first_step:
            self._reporting.unsplit(step, self._split_shares)
        self._reporting.update_trace()

    @property
    def report(self) -> RankReport:
        """The results so far."""
        return self._reporting.report

    def end(self) -> None:
        """After the last step, report it, run the evaluation, and write the checkpoint and trace due."""
        self._settle()
        self._evaluate_and_save(self._setting.run.steps)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        self._reporting.update_trace(is_last=True)

    def close(self) -> None:
        """Stop background threads."""
        if isinstance(self._executor, Executor):
            self._executor.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._swaps is not None:
            self._swaps.close()

    def _require_mean(self) -> None:
        """Refuse a loss with weights if the model does not say that it has one."""
        if not self._batch_loss.is_weighted and any(stage.is_weighted for stage in self._stages.values()):
            raise ModelError(
                f"loss of a {type(self._model).__name__} returned a pair of sum and weight; must be the "
                f"mean over a microbatch. Rename the method to loss_sum, and let loss return the mean."
            )

    @property
    def _split_shares(self) -> dict[int, SplitShare | None]:
        return {index: stage.split_share for index, stage in self._stages.items()}

    def _evaluate_and_save(self, step: int) -> None:
        """Run the evaluation and the checkpoint due before a step, or after the last one."""
        every = self._options.evaluate_every
        if every is not None and step % every == 0:
            self._settle()
            self._evaluate(step)
        if self._checkpoints is not None:
            self._checkpoints.check()
            if self._checkpoints.is_due(step, self._setting.run.steps):
                self._settle()  # it may fail because of values that are not finite, which must not be saved
                self._checkpoints.save(step)

    def _check_ties(self, step: int, what: str) -> None:
        timeout = self._setting.run.startup_patience if step == self.first_step else self._timeout
        with naming_errors(self._rank, f"{what}, comparing copies of tied parameters"):
            self._ties.check(timeout)

    def _evaluate(self, step: int) -> None:
        self._check_ties(step, f"evaluating before step {step}")
        losses = self._executor.evaluate(step)
        self._gradients.free_parameters()
        device = self._setting.device
        with naming_errors(self._rank, f"evaluating before step {step}"):
            found = torch.tensor(list(losses.values()), dtype=torch.float64, device=device)
            self._require_mean()
            mean, _ = self._batch_loss.of(found.unbind())
        self._reporting.evaluation(step, None if mean is None else float(mean))

    def _change_plan(self, step: int) -> None:
        """Change to another plan if one was announced for this step."""
        if self._swaps is None:
            return
        with naming_errors(self._rank, f"before step {step}"):
            plan = self._swaps.before(step)
            if plan is None:
                return
            self._settle()
            self._transport.flush(self._timeout)
        self._plan = plan
        self._agree()
        for index, stage in self._stages.items():
            stage.is_recomputed = plan.cut.recomputes(index)
        self._executor.close()
        self._walk()
        self._reporting.plan_changed(step, plan)
        if self._rank == 0:
            warn_of_another_program(plan, self._options.program, self._setting.device)
        self._reporting.unsplit(step, self._split_shares)

    def _agree(self) -> None:
        """Check that all ranks have the same plan, and open its channels."""
        run, plan, transport = self._setting.run, self._plan, self._transport
        self._stated = stated_structures(getattr(self._model, "shape_of", None), plan.features)
        statement = Statement(
            plan_id=plan.plan_id,
            pp_rank=plan.rank,
            pp_degree=plan.placement.pp_degree,
            world_size=transport.world_size,
            model=run.model.fingerprint(plan.placement.n_stages, plan.cut.partition),
            backend=run.backend,
            steps=run.steps,
            channels=plan.channels,
            traced=run.trace is not None,
            replicas=transport.layout.replicas,
            options=(*self._options.common, ("shape_of", digest_of(self._stated))),
        )
        keys = agree(transport, statement, run.startup_patience)
        with naming_errors(self._rank, "opening the channels"):
            transport.open(keys, run.startup_patience)

    def _build(self) -> dict[int, nn.Module]:
        """Build this rank's stages; returns their modules."""
        options, device = self._options, self._setting.device
        require_compilable(options)
        copies = options.replicas * options.parts  # the loss is a mean over the microbatches of all of them
        self._stages = build_stages(
            self._model,
            self._plan,
            device,
            replicas=copies,
            program=options.program,
            divide=dividing(self._transport, device) if options.is_sharded else None,
        )
        modules = {index: stage.module for index, stage in self._stages.items()}
        for stage in self._stages.values():
            stage.check_graph = partial(require_known_parameters, modules)
        return modules

    def _walk(self) -> None:
        """Create an executor of the current plan; the stages stay the same."""
        parts, transport = self._options.parts, self._transport
        last = self._setting.run.steps * parts - 1
        self._executor = Executor(
            self._plan,
            self._stages,
            DataOfReplica(
                self._model, self._plan.microbatches, transport.replica, transport.layout.replicas, parts
            ),
            transport,
            device=self._setting.device,
            timeout=self._timeout,
            options=ExecutorOptions(
                look_ahead=self._setting.run.receives_ahead,
                progress=self._setting.progress,
                on_stage_done=self._stage_done,
                startup_timeout=self._setting.run.startup_timeout,
                # The first microbatch runs uncompiled, so of one microbatch the second step compiles.
                startup_steps=2 if self._options.is_compiled and self._plan.microbatches == 1 else 1,
                fetch_ahead=fetched_ahead(self._model, self._setting.device),
                last_step=None if isinstance(self._model, StatefulData) else last,
                parts=parts,
                keywords=self._keywords,
                stated=self._stated,
            ),
        )

    def _make_checkpoints(self, modules: dict[int, nn.Module]) -> Checkpoints | None:
        if self._options.checkpoint is None:
            return None
        update = self._update
        trained = TrainedState(
            modules,
            self._setting.run.model.fingerprint(0),
            [] if update.optimizer is None else [update.optimizer],
            [] if update.schedule is None else [update.schedule],
            update.loss_scale,
            self._model,
            self._ties,
        )
        return Checkpoints(
            self._options.checkpoint,
            trained,
            self._transport,
            self._setting.device,
            lambda step, why: self._reporting.checkpoint_skipped(step, why),
        )
