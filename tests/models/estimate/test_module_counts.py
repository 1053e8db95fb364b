"""Operations that torch's counter alone gets wrong: convolutions in groups, our attention, indexers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from zbv_models.estimate.module_counts import Count, Counting, flash, storage  # noqa: E402  # it imports torch

CHANNELS, TOKENS, KERNEL = 24, 32, 4
PRODUCT = 2 * TOKENS * CHANNELS * CHANNELS
"""Operations of a product of all tokens with a square matrix."""


def counted(layer: Any, *shape: int) -> tuple[Count, Any]:
    with torch.device("meta"):
        given = torch.empty(shape)
    counting = Counting(frozenset(map(storage, layer.parameters())))
    if isinstance(layer, Attention):
        layer.attend = flash(counting)
    with counting:
        count, output = counting.run(layer, (given,), {}, list(layer.parameters()))
    return count, output


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
def test_a_backward_of_a_convolution_has_twice_the_operations_of_its_forward(
    groups: int, is_transposed: bool
) -> None:
    kind = torch.nn.ConvTranspose1d if is_transposed else torch.nn.Conv1d
    layer = kind(CHANNELS, CHANNELS, KERNEL, groups=groups, bias=False, device="meta")
    count, output = counted(layer, 1, CHANNELS, TOKENS)
    rows = TOKENS if is_transposed else output.shape[-1]
    assert count.products == 2 * rows * CHANNELS * (CHANNELS // groups) * KERNEL
    assert count.backward == 2 * count.products


class Attention(torch.nn.Module):  # type: ignore[name-defined,misc]  # torch is Any
    """One head with a bias of its scores, and perhaps an indexer, which does not train."""

    def __init__(self, *, has_bias: bool, has_indexer: bool) -> None:
        super().__init__()
        self.query = torch.nn.Linear(CHANNELS, CHANNELS, bias=False, device="meta")
        self.bias = torch.nn.Linear(CHANNELS, TOKENS, bias=False, device="meta") if has_bias else None
        self.indexer = torch.nn.Linear(CHANNELS, CHANNELS, bias=False, device="meta") if has_indexer else None
        self.attend: Any = None

    def forward(self, tokens: Any) -> Any:
        """(1, tokens, channels) to the same."""
        if self.indexer is not None:
            with torch.no_grad():
                self.indexer(tokens)
        query = self.query(tokens)[:, None]
        bias = None if self.bias is None else self.bias(tokens)[:, None]
        return self.attend(self, query, query, query, None, position_bias=bias)[0][:, :, 0]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_indexer", [False, True])
def test_what_attention_is_given_trains_and_what_an_indexer_computes_does_not(
    has_bias: bool, has_indexer: bool
) -> None:
    count, _ = counted(Attention(has_bias=has_bias, has_indexer=has_indexer), 1, TOKENS, CHANNELS)
    products = PRODUCT + (2 * TOKENS * CHANNELS * TOKENS if has_bias else 0)
    scores = 2.0 * CHANNELS * TOKENS * (TOKENS + 1) / 2
    assert count.products == products
    assert count.others == pytest.approx(2 * scores + (PRODUCT if has_indexer else 0), rel=0.05)
    assert count.backward == pytest.approx(2 * products + 5 * scores, rel=0.05)
