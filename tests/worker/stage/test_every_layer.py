"""Every layer that queues computes what autograd computes, for every kind of tensor: I + W = B = autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.split_check import HOOKS, ON_PARAMETERS, Subclass, check, strided
from torch import Tensor, nn
from zbv_worker.adapters.split_modules import split_subclasses

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
STRIDES = ("contiguous", "transposed", "expanded", "gaps")
SHAPES = {  # of what precedes the features, by kind of tensor
    "plain": st.lists(st.integers(0, 3), max_size=3),
    "subclass": st.lists(st.integers(1, 3), max_size=3),
    "sparse": st.lists(st.integers(1, 3), min_size=1, max_size=1),
    "nested": st.lists(st.integers(1, 3), min_size=2, max_size=2),
}


class OwnLinear(nn.Linear):
    """A subclass that inherits its forward."""


class OwnEmbedding(nn.Embedding):
    """A subclass that inherits its forward."""


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


def as_kind(x: Tensor, kind: str, needs_gradient: bool) -> Tensor:
    if kind == "subclass":
        x = x.as_subclass(Subclass)
    elif kind == "sparse":
        x = x.to_sparse()
    elif kind == "nested":
        x = torch.nested.nested_tensor(list(x.unbind()), layout=torch.jagged)
    return x.requires_grad_(needs_gradient)


@settings(max_examples=100, **SETTINGS)
@given(data=st.data())
def test_linears(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES), "dtype")
    kind = draw(st.sampled_from(("plain", "plain", "plain", *SHAPES)), "input")
    rows = draw(SHAPES[kind], "rows")
    inner, outer = draw(st.integers(0, 4), "in_features"), draw(st.integers(0, 4), "out_features")
    layer: nn.Linear = draw(st.sampled_from((nn.Linear, OwnLinear)), "class")(1, 1)
    weight_is = draw(st.sampled_from(("trained", "frozen")), "weight")
    bias_is = draw(st.sampled_from(("trained", "frozen", "absent")), "bias")
    weight = strided((outer, inner), draw(st.sampled_from(STRIDES[:2]), "strides of the weight"), dtype)
    layer.weight = nn.Parameter(weight, requires_grad=weight_is == "trained")
    bias = nn.Parameter(torch.randn(outer, dtype=dtype), requires_grad=bias_is == "trained")
    layer.register_parameter("bias", None if bias_is == "absent" else bias)
    strides = draw(st.sampled_from(STRIDES), "strides of the input")
    needs_gradient = draw(st.booleans(), "gradient of the input")
    hooks = draw(st.sampled_from(sorted(HOOKS)), "hooks")

    def make() -> tuple[Tensor]:
        return (as_kind(strided((*rows, inner), strides, dtype), kind, needs_gradient),)

    is_split = kind == "plain" and not dtype.is_complex and hooks not in ON_PARAMETERS
    is_cast = dtype is torch.float32
    check(
        layer,
        [make] * draw(st.integers(1, 2), "microbatches"),
        hooks=hooks,
        uses=draw(st.integers(1, 3), "uses"),
        autocast=draw(st.sampled_from((None, torch.bfloat16)), "autocast") if is_cast else None,
        casts_backward=is_cast and draw(st.booleans(), "autocast of the backward"),
        prepare=split_subclasses,
        is_split=is_split if is_split or hooks not in ON_PARAMETERS else None,
    )


@settings(max_examples=60, **SETTINGS)
@given(data=st.data())
def test_embeddings(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(DTYPES), "dtype")
    shape = draw(st.lists(st.integers(0, 3), max_size=3), "shape")
    words, width = draw(st.integers(1, 5), "words"), draw(st.integers(0, 4), "width")
    layer: nn.Embedding = draw(st.sampled_from((nn.Embedding, OwnEmbedding)), "class")(words, 1)
    layer.weight = nn.Parameter(torch.randn(words, width, dtype=dtype))
    layer.padding_idx = draw(st.none() | st.integers(-words, -1) | st.integers(0, words - 1), "padding")
    layer.scale_grad_by_freq = draw(st.booleans(), "scaled by frequency")
    special = draw(st.sampled_from(("none", "none", "none", "sparse", "renormalised")), "special")
    layer.sparse = special == "sparse"
    layer.max_norm = 1.0 if special == "renormalised" else None
    layer.weight.requires_grad_(draw(st.booleans(), "trained"))
    numbers = draw(st.sampled_from((torch.int64, torch.int32)), "dtype of the indices")
    is_expanded = draw(st.booleans(), "expanded")
    hooks = draw(st.sampled_from(sorted(set(HOOKS) - {"full backward"})), "hooks")

    def make() -> tuple[Tensor]:
        if is_expanded and shape:
            return (torch.randint(words, (1, *shape[1:]), dtype=numbers).expand(shape),)
        return (torch.randint(words, shape, dtype=numbers),)

    is_plain = not (dtype.is_complex or layer.sparse or layer.max_norm)
    check(
        layer,
        [make] * draw(st.integers(1, 2), "microbatches"),
        hooks=hooks,
        uses=draw(st.integers(1, 3), "uses"),
        prepare=split_subclasses,
        is_split=None if is_plain and hooks in ON_PARAMETERS else is_plain,
    )


@pytest.mark.parametrize(("inner", "outer"), [(0, 3), (3, 0)])
def test_layers_without_features_in_half_precision(inner: int, outer: int) -> None:
    layer = nn.Linear(1, 1)
    layer.weight = nn.Parameter(torch.zeros(outer, inner, dtype=torch.bfloat16))
    layer.bias = nn.Parameter(torch.zeros(outer, dtype=torch.bfloat16))
    check(layer, [lambda: (torch.ones(2, inner, dtype=torch.bfloat16),)] * 2, is_split=True)


@pytest.mark.parametrize(
    ("words", "scaled", "casts_backward"),  # fewer and more words than indices
    [(3, False, True), (3, True, False), (30, False, False), (30, True, True)],
)
def test_embeddings_with_padding(words: int, scaled: bool, casts_backward: bool) -> None:
    layer = nn.Embedding(words, 4, padding_idx=2, scale_grad_by_freq=scaled)
    indices = torch.tensor([[0, 2, 1], [2, 0, 0]])
    check(layer, [lambda: (indices,)] * 2, casts_backward=casts_backward, is_split=True)
