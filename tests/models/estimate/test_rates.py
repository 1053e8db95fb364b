"""Times of matrix products by size, against measured ones; narrow operands."""

from __future__ import annotations

import math

import pytest
from support.estimates import but, estimate_config, llama, parts, preset_config
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.device import Device
from zbv_models.estimate.part import Product
from zbv_models.estimate.sections import preset, preset_names
from zbv_models.estimate.shapes import Stream
from zbv_models.estimate.times import (
    ATTENTION_SHARE,
    KERNEL_LATENCY,
    SUSTAINED_SHARE,
    TRAFFIC_SHARE,
    ULTRA_ATTENTION_SHARE,
    filled_share,
    product_times,
)

DEVICES = [name for name in preset_names() if "kernel_latency" in preset(name).device]

MEASURED = [
    (1, 512, 256, 256, 11.5), (1, 1024, 2048, 256, 139.5), (1, 4096, 512, 512, 238.8),
    (2, 1024, 2048, 1024, 493.4), (1, 4096, 1024, 1024, 488.1), (1, 2048, 2048, 2048, 632.0),
    (1, 4096, 4096, 256, 392.2), (2, 4096, 512, 256, 211.0), (4, 4096, 1024, 1024, 673.8),
    (4, 4096, 4096, 256, 503.9), (2, 2048, 4096, 1024, 678.7), (1, 4096, 4096, 4096, 783.3),
    (4, 4096, 4096, 4096, 793.1), (4, 2048, 1024, 2048, 710.6), (1, 1024, 256, 1024, 68.3),
]  # fmt: skip
"""Products of H100 in bfloat16: how many at once, rows, columns, depth, TFLOP/s (openxla/xla,
xla/service/gpu/model/matmul_interpolator_data.h, sm_90)."""


def test_products_of_all_sizes_have_the_measured_rates() -> None:
    """The mean error is below 10 %, none is above 30 %; one rate for all is wrong by a factor of up to 70.

    They were measured one after the other, at the best rate.
    """
    rates = Device.model_validate(preset("h100").device)
    h100 = rates.model_copy(update={"achieved_tflops": rates.achieved_tflops / SUSTAINED_SHARE})
    errors = []
    for groups, rows, n_out, n_in, measured in MEASURED:
        product = Product(rows, n_in, n_out, groups)
        found = product.flops / product_times(product, Stream(1), h100).forward / 1e6
        errors.append(abs(math.log(found / measured)))
    assert sum(errors) / len(errors) < 0.1
    assert max(errors) < 0.3


@pytest.mark.parametrize("name", DEVICES)
def test_devices_share_the_constants_of_the_curve(name: str) -> None:
    found = preset(name).device
    attention = ULTRA_ATTENTION_SHARE if name in ("b300", "gb300") else ATTENTION_SHARE
    assert (found["kernel_latency"], found["attention_share"]) == (KERNEL_LATENCY, attention)
    assert (found["tensor_parallel_latency"], found["tensor_parallel_step_latency"]) == (8.4, 3.4)
    assert found["processors"] > 50
    assert 0.5 < found["achieved_tflops"] / SUSTAINED_SHARE / found["peak_tflops"] < 0.9
    data_sheet = found["memory_bandwidth"] / TRAFFIC_SHARE
    assert found["product_bandwidth"] == pytest.approx(0.75 * data_sheet, rel=5e-3)
    assert found.get("fp8_tflops", math.inf) > 1.7 * found["achieved_tflops"]


def test_a_product_of_w_reads_and_writes_the_gradients_to_which_it_adds() -> None:
    """With few tokens, memory bounds W: with gradients in float32, 8 bytes of each instead of 2."""
    device = Device(achieved_tflops=400.0, memory_bandwidth=2000.0, kernel_latency=6.0)
    product, weight = Product(16, 4096, 8192), 4096 * 8192
    apart, added = (product_times(product, Stream(4096), device, size) for size in (0.0, 4.0))
    assert added.backward_weight - apart.backward_weight == pytest.approx(6 * weight / 2000e9 * 1e6)
    assert (added.forward, added.backward_input) == (apart.forward, apart.backward_input)
    large = Product(2**16, 4096, 8192)
    assert product_times(large, Stream(4096), device, 4.0) == product_times(large, Stream(4096), device)


def test_fused_gradients_make_w_of_few_tokens_longer_but_not_by_a_kernel() -> None:
    model = llama(sequence=128)
    device = {"kernel_latency": 6.0, "achieved_tflops": 10000.0}
    times = []
    for precision, fused in (
        ("mixed", True),
        ("mixed-fp32-gradients", True),
        ("mixed-fp32-gradients", False),
    ):
        config = estimate_config(model, precision=precision, fused_gradients=fused)
        config = but(config, device=but(config.device, **device))
        block = next(layer for layer in estimate_layers(config) if layer.name == "block")
        times.append(block.plain.times.backward_weight)
    weights = 4 * 4096**2 + 3 * 4096 * 4 * 4096
    per_byte = 1e6 / 1000e9
    # 4, 8 and 2 + 10 bytes: read and written; the gradient of the product, and its addition.
    assert times[1] - times[0] == pytest.approx(4 * weights * per_byte)
    assert times[2] - times[1] == pytest.approx(4 * weights * per_byte)


def test_narrow_operands_are_faster_and_smaller_but_must_be_cast() -> None:
    wide, narrow = llama(), llama(product_dtype="fp8")
    for half in ("attention", "mlp"):
        before, after = parts(wide)[half], parts(narrow)[half]
        assert after.flops == before.flops
        assert after.after_input == before.after_input / 2
    device = Device(achieved_tflops=400.0, memory_bandwidth=2000.0, kernel_latency=6.0, fp8_tflops=800.0)
    product = Product(8192, 8192, 8192)
    slow, fast = (product_times(product, Stream(8192, product_dtype=of), device) for of in (None, "fp8"))
    cast = 8192**2 * (2 + 2 * 1) / 2000e9 * 1e6
    assert slow.backward_weight - 6 == pytest.approx(2 * (fast.backward_weight - 6))
    assert slow.forward - 6 == pytest.approx(2 * (fast.forward - cast - 6))


def test_flash_attention_has_a_share_of_the_rate() -> None:
    config = preset_config("llama-3.1-8b")
    half = but(config, device=but(config.device, attention_share=0.5))
    slower, block = estimate_layers(half)[1].plain.times, estimate_layers(config)[1].plain.times
    core = parts(config.model)["attention"].core
    assert slower.forward - block.forward == pytest.approx(core.forward / 600e12 * 1e6)


def test_misaligned_heads_are_slow_in_plain_attention_only() -> None:
    config = preset_config("gpt-3-175b")

    def times(head_dim: int, attention: str) -> float:
        model = but(config.model, head_dim=head_dim, attention=attention)
        return estimate_layers(but(config, model=model))[1].plain.times.forward

    # 100 values of 2 bytes do not fill 16 bytes evenly; 104 do.
    assert times(100, "plain") > 1.1 * times(104, "plain")
    assert times(100, "flash") < times(104, "flash")


def test_the_last_wave_of_tiles_counts_as_a_full_one() -> None:
    device = Device(achieved_tflops=100.0, processors=100)
    assert filled_share(256 * 10, 128 * 10, 1, device) == 1
    one_more = filled_share(256 * 101, 128, 1, device)
    assert one_more == pytest.approx(0.75 * 101 / 125)  # 404 tiles of 64 x 128 in five waves of 400 / 4
    assert filled_share(256 * 10, 128, 10, device) == 1  # products of experts run at once
    assert filled_share(256 * 101, 128, 1, Device(achieved_tflops=100.0)) == 1
    one = Device(achieved_tflops=100.0, processors=1)
    assert filled_share(65, 65, 1, one) == pytest.approx(0.9 * 65**2 / 128**2)  # no part of a tile


def test_launches_that_wait_lengthen_every_action_of_a_part() -> None:
    config = preset_config("llama-3.1-8b")
    waiting = but(config, device=but(config.device, launch_time=2.0))
    before, after = (estimate_layers(each)[1] for each in (config, waiting))
    found = after.plain.times + before.plain.times.scaled(-1)
    halves = 2
    assert (found.forward, found.backward_input, found.backward_weight) == pytest.approx(
        (halves * 20, halves * 20, halves * 10)
    )
    assert after.shares.launches == pytest.approx(halves * 50)
