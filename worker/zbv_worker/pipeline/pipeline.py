"""A model's layers as a pipeline in the user's own training loop: :class:`Pipeline`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from zbv_solver.plans.plan import Plan

from zbv_worker.errors import InvalidRun, WorkerError, naming_errors
from zbv_worker.execution.executor import DEFAULT_STARTUP_TIMEOUT
from zbv_worker.execution.stated_shapes import ShapeOf
from zbv_worker.execution.timeline import Launched
from zbv_worker.execution.turns import Overlap
from zbv_worker.failures.failures import Failures
from zbv_worker.model.layer_list import Layers
from zbv_worker.model.optimizers import BEFORE_STEP, require_no_line_search
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.agent_run import RunReports
from zbv_worker.pipeline.batch import Batch, microbatches_of
from zbv_worker.pipeline.calls import Call
from zbv_worker.pipeline.checkpoints import PipelineCheckpoints
from zbv_worker.pipeline.connecting import PipelineOptions, PlanLike, connected_world
from zbv_worker.pipeline.data import SharedData
from zbv_worker.pipeline.preparing import prepare
from zbv_worker.pipeline.rank import PipelineRank
from zbv_worker.pipeline.state import PipelineState
from zbv_worker.pipeline.step_plans import PER_STEP, ProblemLike, StepPlans, Values
from zbv_worker.stage.program import Precision
from zbv_worker.tracing.merged_trace import RankTrace
from zbv_worker.transport.world import Backend
from zbv_worker.values.structure import Structure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_LEAVE_SECONDS = 10.0
"""How long it waits for its peers to receive what it sent."""


class Pipeline(PipelineState):
    """This rank's part of a model that runs as a pipeline. Every rank makes one, with the same arguments.

    ::

        pipe = Pipeline(plan, layers, loss=loss)
        optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=3e-4)
        for inputs, targets in loader:
            loss = pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

    The ranks come from ``torch.distributed`` if it is initialised, otherwise from torchrun's environment. A
    process without both is a world of one rank. Until the pipeline is closed, some of the layers' modules are
    of subclasses that can queue weight gradients. Parameters may be added to layers, frozen or unfrozen
    between steps, alike on all replicas. Creating a pipeline, and its methods ``step``, ``evaluate``,
    ``change_plan``, ``full_state_dict``, ``clip_grad_norm_``, ``checkpoints``, ``trace`` and ``close``, are
    collective: every rank calls them, in the same order. If one rank fails, all ranks raise, and the pipeline
    cannot be used any more.

    Parameters
    ----------
    plan
        A plan (``zbv_solver.plan``), a plan file, the URL of a plan, the id of a plan with ``service``, or
        the plan of the agent's run (:func:`zbv_worker.run_plan`). With None, the layers are measured on the
        ranks for a few seconds, with ``example``, and planned. With ``"per-step"``, every step has its own
        plan, see ``problem``.
    layers
        The model's layers in order: a list of modules, or of functions without arguments that build one; a
        mapping of names to these; an ``nn.Sequential``; or an object that builds layers by name
        (:class:`zbv_worker.model.Layered`). Of functions, only those of this rank's layers are called,
        and on the meta device those that refer to modules. A plan that was made without layers divides them
        evenly.
    loss
        Takes the last layer's output and a microbatch's target. Returns the mean over the microbatch, or a
        pair of a sum and its weight, such as the number of tokens: then gradients and losses are those of
        the mean over the whole batch. Whether it is a pair is found in the first step, and must not change.
        By default the loss of ``layers``, if that object has one. If it is a module, or a function that holds
        modules (:func:`zbv_worker.model.loss_module.loss_module`), the rank with the last layer trains them.
    microbatches
        The number of microbatches per step, for ``plan=None``; the plan's number otherwise.
    example
        Input, target and perhaps keywords of one microbatch, for ``plan=None``.
    mesh
        A ``DeviceMesh`` with a dimension named ``pp``. Gradients are summed over dimensions with names that
        begin with ``dp``, where every rank gives its own batch; other dimensions belong to the layers.
    device
        Where this rank computes; by default the CPU for gloo, and the GPU of LOCAL_RANK for NCCL.
    backend
        ``"gloo"`` or ``"nccl"``; by default NCCL where CUDA is available.
    precision
        ``"bfloat16"`` and ``"float16"`` compute suitable operators in that dtype (autocast). With float16, a
        step scales the loss, so that small gradients do not vanish. If gradients overflow, the step changes
        no ``.grad``, as if there had been no batch, and later steps scale by less. The optimizer then leaves
        parameters whose ``.grad`` is None as they are. Every step waits for a sum over all ranks.
    compile
        Whether ``torch.compile`` compiles the layers.
    timeout
        Seconds to wait for any one tensor.
    startup_timeout
        Seconds to meet the other ranks, and to wait for any one tensor in the first step.
    data_rank
        The only rank of the pipeline that passes batches to ``step`` and ``evaluate``, 0 to p - 1; the others
        call these without data. Before the step, each rank is sent what its layers need, once per microbatch:
        the inputs for the first layer, the targets for the last one, the keywords for the layers that take
        them. Batches then consist of tensors and constants in dicts, lists and tuples. In a mesh, each
        pipeline has a data rank at this position: those of different replicas pass different batches. By
        default every rank passes what its own layers need.
    shape_of
        For plans with features: takes the features of a microbatch, a mapping of names to numbers, and
        returns what every stage passes to the next, with tensors on the meta device
        (:class:`zbv_worker.model.protocol.Shaped`). By default the method of ``layers``, if that object has
        one. Without it, the ranks tell each other the shapes.
    problem
        For ``plan="per-step"``: a problem with features (:class:`zbv_solver.StepPlanner`), a document or a
        file. Its features are those of a typical step; every step has others, and as many microbatches.
    overlap
        Runs the pairs of a plan, such as ``0F5+3I2``: takes the forward and the backward
        (:class:`zbv_worker.execution.turns.Half`), and calls each once. By default
        :func:`zbv_worker.in_turns`, if both communicate; otherwise they run one after the other.
    service
        The URL of the service that has the plan. For ``plan=None``, of the service that plans if the planner
        is not installed here.

    Attributes
    ----------
    modules
        This rank's modules, by stage; the children of each are layers. They keep the modes that the user
        sets (``train``, ``eval``). The last stage also has the modules of the loss, as its child ``loss``.

    Raises
    ------
    InvalidRun, Disagreement
        If the plan, the layers and the ranks do not fit together.
    ChannelTimeout, PeerLost
        If a rank does not take part, or cannot start.
    """

    def __init__(
        self,
        plan: PlanLike | None,
        layers: Layers,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        microbatches: int | None = None,
        example: tuple[Any, ...] | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        backend: Backend | None = None,
        precision: Precision = "float32",
        compile: bool = False,
        timeout: float = 120.0,
        startup_timeout: float = DEFAULT_STARTUP_TIMEOUT,
        service: str | None = None,
        data_rank: int | None = None,
        shape_of: ShapeOf | None = None,
        problem: ProblemLike | None = None,
        overlap: Overlap | None = None,
    ):
        plans = StepPlans(problem) if plan == PER_STEP else None
        if plans is None and problem is not None:
            raise InvalidRun('found problem= with a plan; it is for plan="per-step". Omit one of them.')
        options = PipelineOptions(
            plan=plan if plans is None else plans.initial,
            microbatches=microbatches,
            example=example,
            device=device,
            backend=backend,
            precision=precision,
            is_compiled=compile,
            timeout=timeout,
            startup_timeout=startup_timeout,
            service=service,
            data_rank=data_rank,
            shape_of=shape_of,
            overlap=overlap,
        )
        transport, place = connected_world(options, mesh)
        saving: list[PipelineCheckpoints] = []
        failures = Failures(transport.control, timeout, options.patience)
        failures.connected(transport)
        failures.watch()
        with failures.watched("starting"):
            prepared = prepare(options, layers, loss, transport, place)
            self._reports = RunReports.of_environment(prepared.plan, transport, options.patience, failures)
            own = PipelineRank(options, prepared, transport, place, failures.progress, plans)
        failures.on_end = partial(_give_up, saving, own)
        super().__init__(prepared, own, transport, failures, saving, timeout)
        self._shared = None
        if data_rank is not None:
            self._shared = SharedData(options, prepared, transport, failures)
        self._keywords = prepared.keywords
        self._newest: Launched | None = None
        if transport.layout.pp_degree > 1:
            BEFORE_STEP.add(self._refuse_line_search)
        # A process may end right after its last step, before its peers have received its last tensors.
        self._finalizer = weakref.finalize(self, _leave, own, self._shared, self._reports, saving, failures)

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: Sequence[Microbatch | tuple[Any, ...]] | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        sequences: Sequence[Sequence[int]] | None = None,
        features: Values | None = None,
        plan: Plan | None = None,
        outputs: bool = False,
        **keywords: Any,
    ) -> Any:
        """Run the plan on one batch: forward and backward of all microbatches.

        Afterwards ``.grad`` of this rank's parameters has the gradient of the batch's loss, added in place to
        what it had before. Inputs that require a gradient get theirs on the rank with the first layer.

        Parameters
        ----------
        inputs, targets
            A batch; every tensor in them is split along its first dimension into the plan's microbatches,
            except values in :class:`zbv_worker.Whole`, which every microbatch gets as they are.
            Ranks without the first layer do not use the inputs, and ranks without the last layer do not use
            the targets. With ``data_rank``, only that rank passes a batch. The shapes may change from one
            call to the next, if all ranks or only the data rank are given the whole batch.
        microbatches
            The microbatches themselves, in place of a batch. They may have different shapes, if all ranks or
            only the data rank are given the whole batch, or if the plan has features.
        cu_seqlens
            The offsets of a packed batch's sequences, as for FlashAttention: from 0 to the number of tokens.
            Tensors of the batch then have one row per token, or are (1, tokens, …). Layers that name them get
            ``cu_seqlens``, ``max_seqlen`` and ``position_ids`` of their microbatch.
        sequences
            For every microbatch, the indices of its sequences in the packed batch. By default they follow one
            another in the order of the microbatches, with as many tokens as the plan's feature ``tokens``
            states.
        features
            For ``plan="per-step"`` with a problem that has other features than ``tokens`` and
            ``tokens_squared``, or without ``cu_seqlens``: by name, one number per microbatch.
        plan
            For ``plan="per-step"``: the plan of this step, made by a :class:`zbv_solver.StepPlanner` for the
            pipeline's problem, for instance in a process of the data loader. The first rank's counts, or the
            data rank's. Without it, that rank makes a constructor's plan, which takes milliseconds.
        outputs
            Whether to return the last layer's outputs too.
        keywords
            For the layers with parameters of these names; split like the inputs, except values in
            :class:`zbv_worker.Whole`. Every rank with such layers needs them.

        Returns
        -------
        The loss, a scalar tensor, on ranks with the last layer; None on others. With ``outputs``, a pair of
        that and a list of outputs by microbatch. On a GPU the loss may not be computed yet; reading it waits.

        Raises
        ------
        InvalidRun
            If the batch cannot be split, there is no loss, or nothing to train. If a target, a keyword, or an
            input on a rank without the first layer requires a gradient. With ``data_rank``, on all ranks if
            that rank has no batch, and if another rank passes one.
        ModelError
            If the loss has no graph, or uses a trainable tensor of no module.
        ChannelTimeout, PeerLost
            If a peer failed.
        """
        own, shared = self._own, self._shared
        batch = Batch(inputs, targets, keywords, microbatches, cu_seqlens, sequences)
        split = self._microbatches("step", batch, has_plan=plan is not None)
        with self._failures.watched(f"step {own.steps}"):
            given = own.begin("step", batch, split) if shared is None else shared.shapes
            if own.plans is not None:
                if not own.plans.is_source:
                    own.calls.meet_all()
                own.plan_step(plan, own.plans.values(plan, features, cu_seqlens, sequences))
            own.take("step", split, given)
            if own.objective is not None:
                own.objective.outputs = [] if outputs else None
            self._newest, loss = own.step()
            if own.steps == 1:
                self._failures.started()
            if self._reports is not None:
                self._reports.add(self._newest, loss)
        return (loss, own.outputs()) if outputs else loss

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        microbatches: Sequence[Microbatch | tuple[Any, ...]] | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        sequences: Sequence[Sequence[int]] | None = None,
        outputs: bool = False,
        **keywords: Any,
    ) -> Any:
        """Run only the forwards, in evaluation mode and without gradients.

        Parameters, results and errors are those of :meth:`step`. Without a loss, the loss is None.
        """
        own, shared = self._own, self._shared
        batch = Batch(inputs, targets, keywords, microbatches, cu_seqlens, sequences)
        split = self._microbatches("evaluate", batch)
        with self._failures.watched("evaluating"):
            given = own.begin("evaluate", batch, split) if shared is None else shared.shapes
            own.take("evaluate", split, given)
            if own.objective is not None:
                own.objective.outputs = [] if outputs else None
            loss = own.evaluate()
        return (loss, own.outputs()) if outputs else loss

    def change_plan(self, plan: PlanLike) -> None:
        """Run another plan from the next step on, for example one that fits times which have changed.

        Parameters
        ----------
        plan
            As in :class:`Pipeline`: for as many ranks and microbatches, with the same placement, and with the
            same layers on every stage or without layers. Stages may be recomputed otherwise.

        Raises
        ------
        InvalidRun
            If it differs in that. The pipeline goes on with its plan if every rank refuses it.
        Disagreement
            If the ranks have different plans.
        """
        own = self._own
        with self._refusing("change_plan"):
            mine, stated = own.changed(plan)
        with self._failures.watched("changing the plan"):
            own.change_plan(mine, stated, self._newest)

    @property
    def plan_id(self) -> str:
        """The id of the plan that the newest step ran, or the first one will run."""
        return self._own.plan_id

    @property
    def boundaries(self) -> dict[int, Structure]:
        """What crosses the boundaries between stages of this rank and others, known after the first step.

        Boundary k is between the stages k and k + 1. If microbatches differ, the largest is returned.
        """
        return self._own.boundaries

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """The sum of the auxiliary losses of this rank's layers in the newest step; None without any.

        Averaged like the loss, which does not contain them. See :func:`zbv_worker.add_auxiliary_loss`.
        """
        return self._own.auxiliary_loss

    def trace(self, path: str | Path | None = None) -> tuple[RankTrace, ...]:
        """When every rank's actions of the newest step happened, on rank 0's clock; by rank.

        Parameters
        ----------
        path
            Where rank 0 writes the trace for Perfetto; None for nowhere.
        """
        if self._newest is None:
            raise InvalidRun("no step to trace; call step first.")
        with self._failures.watched("collecting the trace"):
            return self._own.trace(self._newest.result(), None if path is None else Path(path))

    def close(self) -> None:
        """Wait until all ranks are done, and close the connections. A second call has no effect.

        The layers are ordinary modules again. A ``torch.distributed`` that the user has initialised stays as
        it is.
        """
        self._finalizer.detach()
        if self._failures.has_failed or self._failures.is_closed:
            return
        with self._failures.watched("closing"):
            self._own.join("close")
        for checkpoints in self._saving:
            checkpoints.complete()
        with self._failures.watched("closing"), naming_errors(self._transport.rank, "closing"):
            if self._reports is not None:
                self._reports.finish()
            self._failures.stop_watching()
            self._own.finish()
        self._failures.is_closed = True
        self._failures.close_transport()
        self._own.release()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._failures.end(error)

    @contextmanager
    def _refusing(self, call: str) -> Iterator[None]:
        """A block that only this rank runs; if it refuses the call, the other ranks learn why."""
        try:
            yield
        except WorkerError as error:
            with self._failures.watched(f"refusing {call}"):
                self._own.calls.refuse(call, str(error))
            raise

    def _refuse_line_search(self, optimizer: torch.optim.Optimizer) -> None:
        """Call before every step of an optimizer in this process."""
        if not (self._failures.is_closed or self._failures.has_failed):
            with self._refusing("step"):
                require_no_line_search(optimizer, self.parameters())

    def _microbatches(self, call: Call, batch: Batch, *, has_plan: bool = False) -> list[Microbatch]:
        """This rank's microbatches of a call. With a data rank collective."""
        own, shared = self._own, self._shared
        with self._refusing(call):
            if call == "step":
                self._require_step(has_plan=has_plan)
            if shared is None:
                return self._split(call, batch)
        with self._failures.watched(f"calling {call}"):
            own.begin_without_batch(call, waits=not shared.is_source)
        # The data rank tells the others if it cannot split the batch.
        return shared.exchange(batch.is_given, partial(self._split, call, batch), equal=batch.is_even)

    def _split(self, call: Call, batch: Batch) -> list[Microbatch]:
        if call == "step":
            batch.require_gradients_can_arrive(has_first_layer=0 in self.modules)
        tokens = None if batch.cu_seqlens is None else self._own.tokens
        return microbatches_of(batch, self._own.microbatches, tokens, self._keywords)

    def _require_step(self, *, has_plan: bool) -> None:
        """Raise :class:`InvalidRun` if no step can run here and now."""
        if not self._own.has_loss:
            raise InvalidRun(
                "the pipeline has no loss; training needs one. Pass loss=, a function of output and target: "
                "Pipeline(plan, layers, loss=torch.nn.functional.cross_entropy)."
            )
        if self._own.plans is None and has_plan:
            raise InvalidRun(
                'found plan=, which is for Pipeline("per-step", …); this pipeline has one plan for all '
                "steps. Omit plan=."
            )
        if not torch.is_grad_enabled():
            raise InvalidRun(
                "found step within torch.no_grad() or torch.inference_mode(), where nothing gets a "
                "gradient. Call step outside of it, or call evaluate."
            )


def _leave(
    own: PipelineRank,
    shared: SharedData | None,
    reports: RunReports | None,
    saving: Sequence[PipelineCheckpoints],
    failures: Failures,
) -> None:
    """Complete this rank's checkpoints and reports, and let the peers receive what the rank has sent."""
    if failures.has_failed:
        return
    failures.stop_watching()
    for checkpoints in saving:
        checkpoints.leave()
    if shared is not None:
        shared.leave(_LEAVE_SECONDS)
    if reports is not None:
        reports.finish()
    own.leave(_LEAVE_SECONDS)
    failures.close_transport()


def _give_up(saving: Sequence[PipelineCheckpoints], own: PipelineRank) -> None:
    """Give up what is being saved, and release the user's modules: the pipeline has failed."""
    for checkpoints in saving:
        checkpoints.give_up()
    own.release()
