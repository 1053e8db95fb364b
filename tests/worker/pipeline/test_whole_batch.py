"""Keywords that belong to the whole batch: marked ones, and those that only the layers can tell apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.plans import searched, unit_problem
from torch import Tensor, nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan
from zbv_worker.errors import InvalidRun
from zbv_worker.pipeline.batch import Batch, microbatches_of, split_batch
from zbv_worker.pipeline.packed import split_packed
from zbv_worker.stage.layers import Keywords
from zbv_worker.stage.whole_batch import Ambiguous
from zbv_worker.values.structure import Structure

ROWS, WIDTH = 4, 8
CAUSAL = torch.full((ROWS, ROWS), -1e9).triu(1)
PADDING = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]) * -1e9
PER_ROW = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
Compute = Callable[..., Tensor]


@pytest.fixture(params=[1, 2, 4])
def plan(request: pytest.FixtureRequest) -> Plan:
    return searched(unit_problem(1, request.param, "v"))


class Layer(nn.Module):
    """Computes a function of a query, the input, and keywords; counts its calls; has a norm and a hook."""

    def __init__(self, compute: Compute):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.compute, self.calls = compute, 0
        self.hooked: list[None] = []
        self.norm.register_forward_hook(lambda *_: self.hooked.append(None))

    def forward(self, x: Tensor, *, a: Any, b: Any = None) -> Tensor:
        self.calls += 1
        self.norm(self.linear(x).flatten(0, 1).detach())
        return self.compute(self.linear(x), x, a) if b is None else self.compute(self.linear(x), x, a, b)


def attention(query: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return (query @ x.mT + mask).softmax(-1) @ x


KINDS: dict[str, tuple[Compute, dict[str, Any]]] = {
    "causal": (attention, {"a": CAUSAL}),
    "padding": (lambda q, x, a: attention(q, x, a[:, None, :]), {"a": PADDING}),
    "both": (lambda q, x, a, b: attention(q, x, a[:, None, :] + b), {"a": PADDING, "b": CAUSAL}),
    "table": (lambda q, x, a: q * a, {"a": PER_ROW}),
    "table cut to the length": (lambda q, x, a: q * a[: x.shape[1]], {"a": PER_ROW}),
    "per sample": (lambda q, x, a: q * a[:, None, :], {"a": PER_ROW}),
    "nested": (
        lambda q, x, a: attention(q, x, a["of"][0][:, None, :] + a["all"]),
        {"a": {"of": (PADDING, 1), "all": CAUSAL}},
    ),
    "fused": (lambda q, x, a: nnf.scaled_dot_product_attention(q, x, x, attn_mask=a), {"a": CAUSAL}),
    "marked": (lambda q, x, a: attention(q, x, a["mask"]), {"a": {"mask": zbv.Whole(CAUSAL)}}),
    "marked and not": (
        lambda q, x, a, b: attention(q, x, a[:, None, :] + b["all"]),
        {"a": PADDING, "b": zbv.Whole({"all": CAUSAL})},
    ),
}


@pytest.mark.parametrize(
    ("kind", "plan"), [(kind, (2, 4, 1)[at % 3]) for at, kind in enumerate(KINDS)], indirect=["plan"]
)
def test_a_square_batch_computes_what_the_unsplit_model_computes(kind: str, plan: Plan) -> None:
    compute, keywords = KINDS[kind]
    torch.manual_seed(0)
    x, own = torch.randn(ROWS, ROWS, WIDTH), [Layer(compute) for _ in range(3)]
    whole = [Layer(compute) for _ in own]
    nn.ModuleList(whole).load_state_dict(nn.ModuleList(own).state_dict())
    y = x
    for layer in whole:
        y = layer(y, **_unmarked(keywords))
    expected = nnf.mse_loss(y, x)
    torch.autograd.backward(expected)
    state = torch.get_rng_state()
    with zbv.Pipeline(plan, own, nnf.mse_loss) as pipe:
        torch.testing.assert_close(pipe.evaluate(x, x, **keywords), expected.detach())
        assert torch.equal(state, torch.get_rng_state())  # what decides draws no random numbers
        torch.testing.assert_close(pipe.step(x, x, **keywords), expected.detach())
    for layer, other in zip(own, whole, strict=True):
        torch.testing.assert_close(layer.linear.weight.grad, other.linear.weight.grad)
        assert layer.calls == len(layer.hooked) == 2 * plan.problem.microbatches
        assert layer.norm.num_batches_tracked == plan.problem.microbatches  # not of the evaluation


def _unmarked(value: Any) -> Any:
    if isinstance(value, zbv.Whole):
        return value.value
    return {key: _unmarked(each) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("is_per_row", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_single_row_of_a_vector_is_not_taken_for_a_width(place: int, is_per_row: bool) -> None:
    """It would fit any width, also one that only the first layer makes."""
    plan = searched(unit_problem(1, ROWS, "v"))

    class Scaled(nn.Linear):
        def forward(self, input: Tensor, *, a: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input) * (a[:, None] if is_per_row else a)

    torch.manual_seed(0)
    own = [nn.Linear(WIDTH + 1, ROWS), nn.Linear(ROWS, ROWS), nn.Linear(ROWS, WIDTH)]
    own[place].__class__ = Scaled
    x, y, vector = torch.randn(ROWS, WIDTH + 1), torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    hidden = x
    for at, layer in enumerate(own):
        hidden = layer(hidden, a=vector) if at == place else layer(hidden)
    with zbv.Pipeline(plan, own, nnf.mse_loss) as pipe:
        torch.testing.assert_close(pipe.step(x, y, a=vector), nnf.mse_loss(hidden, y).detach())


def test_a_layer_that_does_not_show_it_is_refused(plan: Plan) -> None:
    layers = [Layer(lambda q, x, a: q if float(a.sum()) else x) for _ in range(2)]
    x = torch.randn(ROWS, ROWS, WIDTH)
    with zbv.Pipeline(plan, layers, nnf.mse_loss) as pipe:
        said = r"keyword 'a' of shape \[4, 4\].*a=zbv_worker\.Whole.*microbatches="
        is_whole = plan.problem.microbatches == 1  # the microbatch is the whole batch
        with nullcontext() if is_whole else pytest.raises(InvalidRun, match=said):
            pipe.step(x, x, a=CAUSAL)


class Rows(Layer):
    per_row = ("a",)


def test_a_layer_may_say_that_a_keyword_has_rows(plan: Plan) -> None:
    seen: list[torch.Size] = []

    def compute(query: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        seen.append(mask.shape)
        return query

    x = torch.randn(ROWS, ROWS, WIDTH)
    with zbv.Pipeline(plan, [Rows(compute), nn.Identity()], nnf.mse_loss) as pipe:
        pipe.step(x, x, a=CAUSAL)
    assert seen == [(ROWS // plan.problem.microbatches, ROWS)] * plan.problem.microbatches


def test_marked_values_reach_every_microbatch_wherever_they_are() -> None:
    table = torch.randn(3, 3)
    marked = zbv.Whole({"table": table})
    for found in (
        split_batch((torch.zeros(4), marked), [torch.zeros(4), marked], {"a": marked}, 2),
        microbatches_of(Batch(None, None, {}, [(({}, marked), [0, marked], {"a": marked})] * 2), 2),
        split_packed(
            *((torch.zeros(4), marked), [torch.zeros(4), marked], {"a": marked}, [0, 1, 4], [[0], [1]]),
            **{"tokens": None, "count": 2, "taken": Keywords(takes_any=True)},  # type: ignore[arg-type]
        ),
    ):
        for each in found:
            assert each.input[1]["table"] is each.target[1]["table"] is each.keywords["a"]["table"] is table


def test_other_numbers_of_rows_name_the_marker() -> None:
    with pytest.raises(InvalidRun, match=r"keywords\['mask'\] has 3; .*zbv_worker\.Whole"):
        split_batch(torch.zeros(4, 2), None, {"mask": torch.zeros(3, 3)}, 2)


def test_ambiguous_keywords_travel_to_other_ranks() -> None:
    (each, _) = split_batch(torch.zeros(4, 4), None, {"mask": {"all": CAUSAL}}, 2)
    structure = Structure.parse(Structure.of(each).json())
    mask = structure.build(structure.tensors(each)).keywords["mask"]
    assert type(mask) is Ambiguous
    assert torch.equal(mask.whole["all"], CAUSAL)
    assert torch.equal(mask.part["all"], CAUSAL[:2])
