"""One rank's training of one plan: stages, gradients, update, checkpoints, evaluation, changes of plan."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zbv_worker.errors import InvalidRun, ModelError, NotFinite, naming_errors
from zbv_worker.execution.agreement import Statement, agree, agree_on_keywords
from zbv_worker.execution.binding import keywords_of
from zbv_worker.execution.build_stages import build_modules, build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.fetch_ahead import DEFAULT_FETCH_AHEAD
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.step import Launched
from zbv_worker.execution.whole_plan import WholePlan
from zbv_worker.host.state_files import events_file, write_json
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.protocol import FetchedAhead, PipelineModel, StatefulData, Tied, Weighted
from zbv_worker.stage.split_share import SplitShare
from zbv_worker.stage.stage import Stage
from zbv_worker.training.checkpoint import Checkpoints
from zbv_worker.training.gradients import Gradients, gradients_of
from zbv_worker.training.loss_scale import LossScale
from zbv_worker.training.options import (
    Setting,
    require_compilable,
    require_kept_activations,
    require_own_gradients,
    require_plain,
)
from zbv_worker.training.plan_change import Swaps
from zbv_worker.training.program_warning import warn_of_another_program
from zbv_worker.training.replicas import DataOfReplica, mean_over_replicas
from zbv_worker.training.report import RankReport, StepLine
from zbv_worker.training.ties import Ties
from zbv_worker.training.trace_file import TraceFile
from zbv_worker.training.update import Update, Updated
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.control import ConnectedTransport

if TYPE_CHECKING:  # it refuses versions of torch that it does not support
    from zbv_worker.torch_runtime.executor import TorchExecutor


class Training:
    """A plan's training on this rank. All ranks create theirs, and call its methods, in the same order.

    Parameters
    ----------
    whole
        The whole plan, to run it on PyTorch's runtime; None for the worker's executor.
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
        whole: WholePlan | None = None,
        label: str = "",
    ):
        self._setting = setting
        self._transport = setting.transport
        self._rank = setting.transport.rank
        self._timeout = setting.run.timeout
        self._options = options = setting.run.training
        self._plan = plan
        self._whole = whole
        self._model = model
        self._label = label
        self._stages: dict[int, Stage] = {}
        self._launched: Launched | None = None
        self._executor: Executor | TorchExecutor
        self._loss_scale = LossScale.of(options.precision)
        self._agree()
        modules = self._build()
        pairs = model.tied_parameters() if isinstance(model, Tied) else ()
        with naming_errors(self._rank, "connecting ranks with tied parameters"):
            self._ties = Ties(pairs, modules, setting.transport, setting.run.startup_patience)
        with naming_errors(self._rank, "agreeing on the layers' keywords"):
            taken = keywords_of(self._stages.values())
            self._keywords = agree_on_keywords(self._transport, taken, setting.run.startup_patience)
        self._gradients = self._make_gradients(modules)
        if whole is None:
            self._walk()
        else:
            self._walk_on_torch(whole, modules)
        transport = setting.transport
        is_late = isinstance(self._executor, Executor) and self._executor.is_late
        self._update = Update(
            model,
            self._gradients,
            transport,
            self._loss_scale,
            options.clip_norm,
            options.non_finite,
            setting.device,
            names=_names(modules),
            is_late=is_late,
        )
        _seed(setting.run.model.seed, transport)
        self._checkpoints = self._make_checkpoints(modules)
        self.first_step = 0 if self._checkpoints is None else self._checkpoints.load_newest()
        self.report = RankReport(plan.plan_id, transport.rank)
        self._unsplit: set[int] = set()
        expected = {index: stage.expected_share for index, stage in self._stages.items()}
        self._report_unsplit(self.first_step, expected)
        self._trace = TraceFile(options.trace_dir, transport, self._timeout) if options.trace_dir else None
        self._swaps = (
            Swaps(transport, options.next_plan, plan, is_late=is_late) if options.next_plan else None
        )

    def step(self, step: int) -> None:
        """Run one step of the plan and the optimizer, after any evaluation, checkpoint or plan change due.

        On a GPU the step's numbers are reported, and raise errors, while the next step is launched.
        """
        self._evaluate_and_save(step)
        self._change_plan(step)
        for stage in self._stages.values():
            stage.loss_scale = self._loss_scale.value
        self._gradients.begin()
        launched = self._executor.launch(step)
        self._settle()  # of the step before: the executor has seen its end
        with naming_errors(self._rank, f"after step {step}"):
            self._gradients.finish(self._timeout)
            loss, factor = self._weighted(self._mean(launched.losses.values()))
            launched.end(self._update.launch(self._timeout, loss, factor))
        self._launched = launched
        if self._update.must_wait:
            self._settle()

    def _settle(self) -> None:
        """Report the newest step, once it is complete on the device; does nothing if that has been done."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        step, result = launched.step, launched.result()
        updated = self._update.settle(result.numbers)
        loss = result.numbers[0] if launched.losses else None
        line = StepLine(step, self._plan.plan_id, loss, result.seconds, result.update_seconds, updated)
        self.report.add(line, result)
        self._say_loss(f"step {step}:", loss, f", {result.seconds:.3f} s{_outcome(updated)}")
        self._report_non_finite(step, updated)
        if step == self.first_step:
            self._report_unsplit(step, {at: stage.split_share for at, stage in self._stages.items()})
        if self._trace is not None:
            self._trace.update(self.report)

    def end(self) -> None:
        """After the last step, report it, run the evaluation, and write the checkpoint and trace due."""
        self._settle()
        self._evaluate_and_save(self._setting.run.steps)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._trace is not None:
            self._trace.update(self.report, is_last=True)

    def close(self) -> None:
        """Stop background threads."""
        if isinstance(self._executor, Executor):
            self._executor.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._swaps is not None:
            self._swaps.close()

    def _mean(self, losses: Collection[Tensor]) -> Tensor | None:
        """The mean over microbatches and replicas, a float64 scalar; None without losses. Collective."""
        mean = None
        if losses:
            mean = torch.cat([loss.detach().reshape(1) for loss in losses]).double().sum() / len(losses)
        return mean_over_replicas(self._transport, mean, self._timeout, self._setting.device)

    def _weighted(self, loss: Tensor | None) -> tuple[Tensor | None, Tensor | float]:
        """Convert a mean over microbatches to a mean over weights; returns loss and factor of the gradients.

        Collective if the model weights its microbatches.
        """
        if not isinstance(self._model, Weighted):
            if any(stage.is_weighted for stage in self._stages.values()):
                raise ModelError(
                    f"loss of a {type(self._model).__name__} returned a pair of sum and weight; must be the "
                    f"mean over a microbatch. Rename the method to loss_sum, and let loss return the mean."
                )
            return loss, 1.0
        mine = sum(stage.take_weight() for stage in self._stages.values())
        weights = torch.zeros((), dtype=torch.float64, device=self._setting.device) + mine
        whole = self._transport.sum_over_ranks(weights.reshape(1), self._timeout)[0]
        # The inner ranks of a replica have the same weights.
        layout = self._transport.layout
        whole, microbatches = whole / layout.inner, self._plan.microbatches * layout.replicas
        # If all weights are 0, there is nothing to learn from, and the mean is undefined.
        factor = torch.where(whole > 0, microbatches / whole, 0.0)
        return (None if loss is None else torch.where(whole > 0, loss * factor, math.nan)), factor

    def _report_non_finite(self, step: int, updated: Updated) -> None:
        """Report values that are not finite; raises :class:`NotFinite` if the run must fail."""
        for what, value in updated.non_finite:
            if what != "loss" or self._transport.column == 0:  # all columns have the same loss
                self._note("non_finite", step, what=what, value=str(value))
                _say(f"step {step}: {self._label}the {what} is {value}")
        if updated.is_failed:
            said = " and ".join(f"the {what} is {value}" for what, value in updated.non_finite)
            raise NotFinite(
                f"rank {self._rank}, step {step}: {said or 'the loss or the gradient norm is not finite'}. "
                f"Check the data and the learning rate, or pass --non-finite skip to skip such steps."
            )

    def _report_unsplit(self, step: int, shares: Mapping[int, SplitShare | None]) -> None:
        """Report, once, stages whose W computes little although the plan splits them: bubbles stay."""
        split = {action.stage for action in self._plan.actions if action.letter == "I"} - self._unsplit
        for index in sorted(split):
            found = shares.get(index)
            if found is not None and found.is_small and self._transport.column == 0:
                self._unsplit.add(index)
                share, modules = round(found.share, 3), list(found.unsplit[:20])
                self._note("little_to_split", step, stage=index, share=share, modules=modules)
                _say(
                    f"{self._label}stage {index}: {found}. The plan relies on W: measure the costs with "
                    f"zbv-worker profile, or use plain nn.Linear and nn.Embedding there."
                )

    def _note(self, kind: str, step: int, **more: object) -> None:
        """Record an event in the report, and in a file if the service knows its kind."""
        event = {"kind": kind, "step": step, **more}
        self.report.events.append(event)
        if self._options.trace_dir is not None and kind == "non_finite":
            known = [event for event in self.report.events if event["kind"] == kind]
            document = {"rank": self._rank, "events": known}
            write_json(events_file(self._options.trace_dir, self._rank), document)

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

    def _evaluate(self, step: int) -> None:
        if not isinstance(self._executor, Executor):
            raise InvalidRun("--runtime torch cannot evaluate; use --runtime zbv.")
        losses = self._executor.evaluate(step)
        self._gradients.free_parameters()
        device = self._setting.device
        with naming_errors(self._rank, f"evaluating before step {step}"):
            found = torch.tensor(list(losses.values()), dtype=torch.float64, device=device)
            mean, _ = self._weighted(self._mean(found.unbind()))
        loss = None if mean is None else float(mean)
        if loss is not None:
            self.report.evaluations[step] = loss
        self._say_loss(f"before step {step}: evaluation", loss)

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
        before, self._plan = self._plan, plan
        self._agree()
        for index, stage in self._stages.items():
            stage.is_recomputed = plan.cut.recomputes(index)
        if isinstance(self._executor, Executor):
            self._executor.close()
        self._walk()
        if self._rank == 0:
            _say(f"step {step}: changing from plan {before.plan_id[:12]} to {plan.plan_id[:12]}")
            warn_of_another_program(plan, self._options.program, self._setting.device)
        self._unsplit.clear()  # a plan may rely on the W of other stages
        self._report_unsplit(step, {index: stage.split_share for index, stage in self._stages.items()})

    def _agree(self) -> None:
        """Check that all ranks have the same plan, and open its channels."""
        run, plan, transport = self._setting.run, self._plan, self._transport
        statement = Statement(
            plan_id=plan.plan_id,
            pp_rank=plan.rank,
            pp_degree=plan.placement.pp_degree,
            world_size=transport.world_size,
            model=run.model.fingerprint(plan.placement.n_stages, plan.cut.partition),
            backend=run.backend,
            runtime="zbv" if self._whole is None else "torch",
            steps=run.steps,
            channels=plan.channels,
            traced=run.trace is not None,
            replicas=transport.layout.replicas,
            options=self._options.common,
        )
        keys = agree(transport, statement, run.startup_patience)
        if self._whole is None:
            with naming_errors(self._rank, "opening the channels"):
                transport.open(keys, run.startup_patience)

    def _build(self) -> dict[int, nn.Module]:
        """Build this rank's stages; returns their modules."""
        options, device = self._options, self._setting.device
        if self._whole is not None:
            require_plain(options, self._model)
            require_kept_activations(self._plan)
            modules = build_modules(self._model, self._plan, device)
            require_own_gradients(modules)
            return modules
        require_compilable(options)
        self._stages = build_stages(
            self._model, self._plan, device, replicas=options.replicas, program=options.program
        )
        return {index: stage.module for index, stage in self._stages.items()}

    def _make_gradients(self, modules: dict[int, nn.Module]) -> Gradients:
        has_main = self._options.has_main_gradients
        if self._options.is_sharded:
            if self._ties:
                raise InvalidRun(
                    "--shard: found tied parameters on different ranks. Use placement v, which has the first "
                    "and the last stage on one rank, or omit --shard."
                )
            return _sharded(modules, self._transport, self._setting.device, self._timeout, has_main=has_main)
        return gradients_of(modules, self._transport, has_main=has_main, ties=self._ties)

    def _walk(self) -> None:
        """Create an executor of the current plan; the stages stay the same."""
        self._gradients.follow(list(dict.fromkeys(action.stage for action in self._plan.actions)))
        self._executor = Executor(
            self._plan,
            self._stages,
            DataOfReplica(self._model, self._plan.microbatches, self._transport.replica),
            self._transport,
            device=self._setting.device,
            timeout=self._timeout,
            options=ExecutorOptions(
                look_ahead=self._setting.run.receives_ahead,
                progress=self._setting.progress,
                on_stage_done=self._gradients.stage_done,
                startup_timeout=self._setting.run.startup_timeout,
                # The first microbatch runs uncompiled, so of one microbatch the second step compiles.
                startup_steps=2 if self._options.is_compiled and self._plan.microbatches == 1 else 1,
                fetch_ahead=_fetch_ahead(self._model, self._setting.device),
                last_step=None if isinstance(self._model, StatefulData) else self._setting.run.steps - 1,
                keywords=self._keywords,
            ),
        )

    def _walk_on_torch(self, whole: WholePlan, modules: dict[int, nn.Module]) -> None:
        from zbv_worker.torch_runtime.executor import TorchExecutor

        self._executor = TorchExecutor(
            whole,
            self._plan.rank,
            modules,
            self._model,
            device=self._setting.device,
            backend=self._setting.run.backend,
            timeout=self._timeout,
        )

    def _make_checkpoints(self, modules: dict[int, nn.Module]) -> Checkpoints | None:
        if self._options.checkpoint is None:
            return None
        return Checkpoints(
            self._options.checkpoint,
            modules,
            self._update,
            self._setting.run.model.fingerprint(0),
            self._model,
            self._transport,
            self._setting.device,
            self._ties,
        )

    def _say_loss(self, begin: str, loss: float | None, end: str = "") -> None:
        if loss is not None and self._transport.column == 0:
            _say(f"{begin} {self._label}loss {loss:.4f}{end}")


def _names(modules: Mapping[int, nn.Module]) -> dict[nn.Parameter, str]:
    """The parameters' names in the whole model."""
    return {
        parameter: whole_name(name)
        for module in modules.values()
        for name, parameter in module.named_parameters()
    }


def _fetch_ahead(model: PipelineModel, device: torch.device) -> int:
    """How many microbatches to fetch ahead on a thread."""
    if isinstance(model, FetchedAhead):
        return model.fetch_ahead
    return DEFAULT_FETCH_AHEAD if device.type == "cuda" else 0


def _seed(seed: int, transport: Transport) -> None:
    """Give every position and replica its own random numbers: replicas with equal dropout would learn less.

    The inner ranks of a replica get equal ones, or dropout would make their common activations differ.
    Called after the stages are built, because the model may have seeded the same generators.
    """
    place = transport.pp_rank * transport.layout.replicas + transport.replica
    digest = hashlib.sha256(f"{seed}/{place}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))
    random.seed(digest)


def _sharded(
    modules: dict[int, nn.Module],
    transport: Transport,
    device: torch.device,
    timeout: float,
    *,
    has_main: bool,
) -> Gradients:
    from zbv_worker.training.sharding import ShardedGradients  # imports DTensor, which takes a second

    if not isinstance(transport, ConnectedTransport) or transport.replica_group is None:
        raise InvalidRun(
            "--shard: found one replica; parameters are divided among several. Pass --data-parallel."
        )
    group = transport.replica_group
    return ShardedGradients(modules, transport, group, device, timeout, has_main=has_main)


def _outcome(updated: Updated) -> str:
    """What became of a step whose numbers are not finite, for its line."""
    if updated.is_failed:
        return ", not finite"
    return ", not finite: skipped" if updated.is_skipped else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a rank's log
