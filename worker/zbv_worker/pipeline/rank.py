"""What one rank of a pipeline runs: the executor of its list, and the gradients of its stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zbv_solver.documents.files import write
from zbv_solver.plans.plan import Plan

from zbv_worker.errors import InvalidRun, WorkerError, naming_errors
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.stated_shapes import stated_structures
from zbv_worker.execution.timeline import Launched, StepResult
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.gradients.gradients import Accumulation, multiply, trained_by
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.batch import Batch, StepData
from zbv_worker.pipeline.calls import CALLS, AgreedShapes, Announcement, Call, Calls, Given, Shapes, digest
from zbv_worker.pipeline.connecting import PipelineOptions, PlanLike, RankDevice
from zbv_worker.pipeline.preparing import Prepared, model_digest, open_channels, prepare_change
from zbv_worker.pipeline.step_plans import StepPlans, Values
from zbv_worker.pipeline.trained_stages import TrainedStages, numbers_of_place, place_of
from zbv_worker.stage.dtensors import local_of
from zbv_worker.stage.recorder import stop_deferring
from zbv_worker.tracing.merged_trace import Alignment, RankTrace, claim, collect, find_offsets, render
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.nccl_operations import NCCL_LOOK_AHEAD
from zbv_worker.values.structure import Structure, tensors_of


class PipelineRank:
    """Runs the steps of one rank.

    Parameters
    ----------
    progress
        Updated with every action.
    plans
        The part in planning every step; None if one plan runs in all steps.

    Attributes
    ----------
    device
        Where it computes.
    data
        The microbatches of the step or evaluation.
    ties
        The parameters with copies.
    has_loss
        Whether there is a loss.
    objective
        Computes the loss; None on ranks without the last stage.
    loss_scale
        The factor of gradients during a step, for float16.
    microbatches
        The plan's number of microbatches.
    steps
        The number of steps so far.
    """

    def __init__(
        self,
        options: PipelineOptions,
        prepared: Prepared,
        transport: ConnectedTransport,
        place: RankDevice,
        progress: CurrentProgress,
        plans: StepPlans | None = None,
    ):
        plan = prepared.plan
        self._progress = progress
        self._options, self._backend = options, place.backend
        self.loss_scale = LossScale.of(options.precision)
        self._timeout, self._patience = options.timeout, options.patience
        self._transport, self._place = transport, place_of(transport)
        self.device = place.device
        self.data = StepData()
        self.calls = Calls(transport, plan.channels, progress, options.timeout, options.patience)
        self._agreed = AgreedShapes(
            transport,
            self.calls,
            prepared.keywords_by_rank,
            options.patience,
            may_differ=bool(plan.features),
        )
        self.has_loss = prepared.has_loss
        self.microbatches = plan.microbatches
        self.steps = 0
        self._absent = prepared.absent
        self.trained = TrainedStages(
            plan,
            prepared.stages,
            self.data,
            transport,
            place.device,
            ExecutorOptions(
                look_ahead=NCCL_LOOK_AHEAD if place.backend == "nccl" else DEFAULT_LOOK_AHEAD,
                startup_timeout=options.startup_timeout,
                keywords=prepared.keywords,
                progress=progress,
                stated=prepared.stated,
                meet=self.calls.meet,
                overlap=options.overlap,
            ),
            program=options.program,
            timeout=options.timeout,
            patience=options.patience,
            tied=prepared.ties,
        )
        self.ties = self.trained.ties
        last_stage = prepared.stages.get(plan.placement.n_stages - 1)
        self.objective = None if last_stage is None else last_stage.objective
        self._first_stage = prepared.stages.get(0)
        self._accumulation = Accumulation(self.trained.gradients)
        self._note(trained_by(prepared.modules))
        self.plans, self._shape_of = plans, prepared.shape_of
        if plans is not None:
            plans.connect(plan, transport, options.data_rank or 0, options.patience)

    @property
    def plan_id(self) -> str:
        """The id of the current plan."""
        return self.trained.plan.plan_id

    @property
    def tokens(self) -> list[int] | None:
        """The tokens of every microbatch, if the plan has a feature of that name and runs in all steps."""
        if self.plans is not None or not all("tokens" in features for features in self.trained.plan.features):
            return None
        return [int(features["tokens"]) for features in self.trained.plan.features] or None

    def _note(self, parameters: list[tuple[int, nn.Parameter]]) -> None:
        """Note the parameters that are trained, by stage."""
        self._parameters = parameters
        self._identities = [(stage, id(parameter)) for stage, parameter in parameters]
        self._trained_digest = digest([(stage, *p.shape, str(p.dtype)) for stage, p in parameters])

    def _follow_parameters(self) -> int:
        """Find the parameters that the user has added, removed, frozen or unfrozen since the last step.

        Returns a number that stands for those that are trained.
        """
        parameters = trained_by(self.trained.modules)
        # == would compare values.
        if [(stage, id(parameter)) for stage, parameter in parameters] != self._identities:
            self._note(parameters)
            self._accumulation.replace(self.trained.make_gradients)
            self.trained.gradients = self._accumulation.gradients
        return self._trained_digest

    def changed(self, given: PlanLike) -> tuple[RankPlan, Sequence[Structure]]:
        """This rank's part of another plan; raises :class:`InvalidRun` if steps cannot change to it."""
        if self.plans is not None:
            raise InvalidRun(
                "found change_plan of a pipeline that plans every step. Pass the plan to step, as plan=."
            )
        current = self.trained.plan
        return prepare_change(self._options, given, current, self._shape_of, self._transport)

    def change_plan(self, plan: RankPlan, stated: Sequence[Structure], newest: Launched | None) -> None:
        """Run a plan of :meth:`changed` from the next step on. Collective."""
        self.join("change_plan")
        if newest is not None:
            newest.result()  # a GPU may still receive for it
        with naming_errors(self._transport.rank, "changing the plan"):
            self._transport.flush(self._timeout)
        open_channels(
            plan,
            self._transport,
            model=model_digest(plan, ()),
            backend=self._backend,
            patience=self._timeout,
            stated=stated,
            options=self._options.common,
        )
        self.trained.change(plan, stated)

    def plan_step(self, plan: Plan | None, values: Values | None) -> None:
        """Change to the plan of the step that begins, if every step has one. Collective.

        Parameters are those of :meth:`StepPlans.choose`.
        """
        if self.plans is None:
            return
        self._progress.doing = "waiting for the plan of the step"
        chosen = self.trained.plan = self.plans.choose(plan, values)
        self.trained.executor.follow(chosen, stated_structures(self._shape_of, chosen.features))

    def take(self, call: Call, microbatches: list[Microbatch], given: Given | Shapes) -> None:
        """Set the microbatches of the next step or evaluation. Collective if their shapes are new.

        Parameters
        ----------
        given
            What this rank was given, or the shapes on which the ranks agree already.
        """
        self.data.microbatches = microbatches
        self._progress.doing = "comparing the batches of all ranks"
        shapes = self._agreed.agree(call, given) if isinstance(given, Given) else given
        self.trained.executor.expect(shapes, evaluation=call == "evaluate")

    def begin(self, call: Call, batch: Batch, microbatches: list[Microbatch]) -> Given:
        """Tell the neighbours of a step or evaluation; returns what this rank was given."""
        self._progress.doing = f"calling {call}"
        given = Given.of(microbatches, equal=batch.is_even, rows=batch.rows)
        # What neighbours must have too: all shapes, if the ranks see them.
        shapes = given.combination + 1 if self._agreed.rule.get(call) == "seen" else 0
        trained = self._follow_parameters() if call == "step" else 0
        mine = Announcement(CALLS[call], shapes=shapes, trained=trained)
        has_first, has_last = self._first_stage is not None, self.objective is not None
        self.calls.begin(mine.of_batch(given, microbatches, has_first=has_first, has_last=has_last))
        return given

    def begin_without_batch(self, call: Call, *, waits: bool) -> None:
        """Tell the neighbours of a step or evaluation whose batch the data rank has.

        Parameters
        ----------
        waits
            Whether this rank then waits for that batch.
        """
        trained = self._follow_parameters() if call == "step" else 0
        self.calls.begin(Announcement(CALLS[call], trained=trained))
        if waits:
            self.calls.meet_all()

    def join(self, call: str) -> None:
        """Begin a call in which all ranks wait for each other anyway. Collective."""
        with naming_errors(self._transport.rank, f"calling {call}"):
            self.calls.begin(Announcement(CALLS[call]))
            self.calls.meet_all()

    def check_ties(self, what: str) -> None:
        """Require that copies of tied parameters are equal. Collective."""
        self.trained.check_ties(what, is_first=self.steps == 0)

    def step(self) -> tuple[Launched, Tensor | None]:
        """Run the plan once; returns the step, and the loss on ranks with the last stage. Collective."""
        self._progress.doing = f"step {self.steps}"
        if self.trained.has_ties:
            self.check_ties(f"step {self.steps}")
        if self.steps == 0:
            self._require_trainable()
        before = self._side_effects() if self.trained.batch_loss.is_weighted is None else None
        # Replicas must not sum earlier gradients again, and weights scale only the step's own gradients.
        sums_over_ranks = self.trained.gradients.sums_over_ranks
        is_final = not sums_over_ranks and self.trained.batch_loss.is_weighted is False
        if self.loss_scale.is_dynamic:
            is_final = False
            for stage in self.trained.stages.values():
                stage.loss_scale = self.loss_scale.value
        self._accumulation.begin(in_place=is_final)
        unused = [] if self.steps else [n for n, absent in self._absent.items() if absent.grad is None]
        with numbers_of_place(self._place, self.device, advances=True):
            (launched,) = self.trained.launch(self.steps, of_batch=self._is_batch_trained)
        self.calls.meet_all()
        for name in unused:
            if self._absent[name].grad is not None:
                raise InvalidRun(
                    f"a layer of rank {self._transport.rank} uses {name}, a parameter of a layer on another "
                    f"rank. Make it a parameter of both layers: it is then tied."
                )
        self._progress.doing = f"after step {self.steps}"
        mean, factor = self.trained.finish([launched])
        inputs = [] if self._first_stage is None else self._first_stage.take_input_gradients()
        if self.trained.batch_loss.must_repeat:
            if self.objective is not None and self.objective.outputs is not None:
                self.objective.outputs = []
            self._accumulation.cancel()
            if before is not None:
                before()
            return self.step()
        # In the dtype of the microbatches' losses.
        loss = None if mean is None else mean.to(next(iter(launched.losses.values())).dtype)
        scale = self.loss_scale.value
        if self.loss_scale.is_dynamic and self._overflows():
            self._accumulation.cancel()
        else:
            factor = factor / scale
            self._accumulation.end(factor)
            if inputs:
                _backpropagate_inputs(inputs, factor)
        launched.end()
        self.steps += 1
        if self.steps == 1:
            self._say_what_is_unsplit()
        return launched, loss

    def _overflows(self) -> bool:
        """Whether a smaller loss scale may avoid what is not finite in the gradients. Collective.

        Adjusts the scale for the next step. Waits for the device.
        """
        squared = self.trained.gradients.square_sum()
        mine = torch.zeros((), dtype=torch.float64, device=self.device) if squared is None else squared
        total = self._transport.sum_over_ranks(mine.reshape(1), self._timeout)
        is_finite, may_shrink = bool(total.isfinite()), self.loss_scale.may_shrink
        self.loss_scale.update(is_finite=is_finite)
        return may_shrink and not is_finite

    def _say_what_is_unsplit(self) -> None:
        """Name the stages that the plan splits and whose W has little to compute: bubbles stay."""
        for index, share in self.trained.split_shares.items():
            if share is not None and share.is_small:
                print(f"zbv: stage {index}: {share}", file=sys.stderr, flush=True)  # noqa: T201 - a rank's log

    def _require_trainable(self) -> None:
        """Refuse parameters that cannot be trained, and a model that has none. Collective."""
        changed: list[Tensor] = [parameter for _, parameter in self._parameters]
        changed += [buffer for module in self.trained.modules.values() for buffer in module.buffers()]
        made_in_inference = any(tensor.is_inference() for tensor in changed)
        is_trained = bool(self._parameters) or self._is_batch_trained()
        mine = torch.tensor([made_in_inference, is_trained], dtype=torch.float64, device=self.device)
        with naming_errors(self._transport.rank, "counting trainable parameters"):
            bad, trained = self._transport.sum_over_ranks(mine, self._patience).tolist()
        if bad:
            raise InvalidRun(
                "found parameters or buffers that were made in torch.inference_mode(), which torch cannot "
                "train. Build or load the layers outside of it."
            )
        if not trained:
            raise InvalidRun(
                "found no parameter that requires a gradient, on any rank; a step would train nothing. Leave "
                "at least one parameter trainable, or call evaluate."
            )

    def _is_batch_trained(self) -> bool:
        """Whether the batch of this rank needs a gradient."""
        given = (tensor for each in self.data.microbatches for tensor in tensors_of(each.input))
        return any(tensor.requires_grad for tensor in given)

    def _side_effects(self) -> Callable[[], None]:
        """How to undo a step's changes of buffers, such as running means, and of random numbers."""
        buffers = [
            (each, each.clone()) for module in self.trained.modules.values() for each in module.buffers()
        ]
        state = torch.get_rng_state()
        of_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

        def undo() -> None:
            for buffer, value in buffers:
                buffer.copy_(value)
            torch.set_rng_state(state)
            if of_device is not None:
                torch.cuda.set_rng_state(of_device, self.device)

        return undo

    def evaluate(self) -> Tensor | None:
        """Run the forwards; returns the loss on ranks with the last stage. Collective."""
        self.check_ties("evaluating")
        numbers = numbers_of_place(self._place, self.device, advances=False)
        with naming_errors(self._transport.rank, "evaluating"), numbers:
            mean = self.trained.evaluate(self.steps, self.calls.meet_all, has_loss=self.has_loss)
        return None if mean is None else mean.to(torch.get_default_dtype())

    @property
    def boundaries(self) -> dict[int, Structure]:
        """What crosses the boundaries to other ranks, as far as it is known."""
        return self.trained.executor.boundaries

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """The sum of this rank's auxiliary losses in the newest step; None without any."""
        return self.trained.batch_loss.auxiliary

    def outputs(self) -> list[Any] | None:
        """The last layer's outputs of the newest step or evaluation, by microbatch."""
        last = self.trained.plan.placement.n_stages - 1
        order = [a.microbatch for a in self.trained.plan.actions if a.letter == "F" and a.stage == last]
        recorded: list[Any] = []
        if self.objective is not None and self.objective.outputs is not None:
            recorded, self.objective.outputs = self.objective.outputs, None
        by_microbatch = dict(zip(order, recorded, strict=True))
        return [by_microbatch[index] for index in range(self.microbatches)] if order else None

    def clip(self, max_norm: float) -> Tensor:
        """Limit the norm of all gradients of the model; returns the norm before. Collective."""
        self.join("clip_grad_norm_")
        gradients = [local_of(p.grad) for p in self.trained.gradients.parameters if p.grad is not None]
        found = self.trained.gradients.square_sum(lambda parameter: parameter.grad)
        mine = torch.zeros((), dtype=torch.float64, device=self.device) if found is None else found
        with naming_errors(self._transport.rank, "clipping gradients"):
            norm = self._transport.sum_over_ranks(mine.reshape(1), self._timeout)[0].sqrt()
        multiply(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.float()

    def trace(self, newest: StepResult, path: Path | None) -> tuple[RankTrace, ...]:
        """A step on all ranks; rank 0 writes it to ``path``. Collective."""
        self.join("trace")
        if path is not None and self._transport.rank == 0:
            claim(path, "trace")
        mine = RankTrace.of(self.trained.plan.plan_id, self._transport.rank, [newest])
        offsets = find_offsets(self._transport, self._timeout)
        alignment = Alignment(offsets, offsets)
        traces = collect(self._transport, mine, alignment, self._timeout)
        if path is not None and self._transport.rank == 0:
            write(path, render([traces], alignment))
        return traces

    def finish(self) -> None:
        """Wait until all ranks have received everything. Collective."""
        self.check_ties("closing")
        self.trained.executor.close()
        self._transport.flush(self._timeout)
        self._transport.barrier(self._timeout)

    def leave(self, timeout: float) -> None:
        """Let the peers receive what this rank has sent, within ``timeout`` seconds."""
        self.release()
        with suppress(TimeoutError, ConnectionError, WorkerError):
            self.trained.executor.close()
            self._transport.flush(timeout)

    def release(self) -> None:
        """Undo the changes to the user's modules, and end the planner. Modules then work without zbv."""
        self.trained.gradients.rest(forget=True)
        for module in self.trained.modules.values():
            stop_deferring(module)


def _backpropagate_inputs(pairs: list[tuple[Tensor, Tensor]], factor: Tensor | float) -> None:
    """Continue the backward into the graphs of the batch's inputs, once for all microbatches."""
    inputs, gradients = zip(*pairs, strict=True)
    multiply([*gradients], factor)
    torch.autograd.backward(inputs, gradients)
