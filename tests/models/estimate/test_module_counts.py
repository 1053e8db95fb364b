"""Operations of convolutions, whose groups torch's formula for the backward does not know."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from zbv_models.estimate.module_counts import Counting, storage  # noqa: E402  # it imports torch

CHANNELS, TOKENS, KERNEL = 24, 32, 4


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
def test_a_backward_of_a_convolution_has_twice_the_operations_of_its_forward(
    groups: int, is_transposed: bool
) -> None:
    kind = torch.nn.ConvTranspose1d if is_transposed else torch.nn.Conv1d
    with torch.device("meta"):
        layer = kind(CHANNELS, CHANNELS, KERNEL, groups=groups, bias=False)
        given = torch.empty(1, CHANNELS, TOKENS)
    counting = Counting(frozenset(map(storage, layer.parameters())))
    with counting:
        count, output = counting.run(layer, (given,), {}, list(layer.parameters()))
    rows = TOKENS if is_transposed else output.shape[-1]
    assert count.products == 2 * rows * CHANNELS * (CHANNELS // groups) * KERNEL
    assert count.backward == 2 * count.products
