"""Times of F, I and W of a part on a device, in microseconds.

The time of a part is the sum of three: its matrix products, the memory traffic of all other operations, and
the exchanges with other devices that compute does not hide.

A product takes the longer of its operations at the device's rate and of its matrices through memory (the
roofline of Williams et al. 2009, §3), and a constant that does not depend on its size: launch, first loads,
last wave. One constant for all devices and shapes describes the 58 shapes of a public table of H100 products
with a mean error of 6 % (OpenXLA, ``xla/service/gpu/model/matmul_interpolator_data.h``, bfloat16, from 256 x
512 x 256 to 4 x 4096³): 6 us, 0.80 of the data sheet's rate and 2500 GB/s. The best rates of other devices
are 0.5 to 0.87 of their data sheets (Bekman, Machine Learning Engineering, "Maximum Achievable Matmul
FLOPS").
"""

from __future__ import annotations

from zbv_solver.estimate.amounts import PerAction
from zbv_solver.estimate.device import MICROSECONDS, TERA, Device, GroupLinks
from zbv_solver.estimate.part import NONE, Exchange, Part, Product
from zbv_solver.estimate.shapes import PRODUCT_BYTES, Stream

KERNEL_LATENCY = 6.0
"""Microseconds of a product in addition to its operations; see above."""
ATTENTION_SHARE = 0.7
"""Rate of flash attention over that of large products.

Forward and backward with a head of 128 and a causal mask: 190 and 175 of 271 TFLOP/s on A100 (Dao 2023,
figures 4 and 6), 600 and 500 of 794 on H100 (Shah et al. 2024, FlashAttention-3, figures 5 and 6), for long
sequences.
"""


def compute_times(part: Part, stream: Stream, device: Device) -> PerAction:
    """Products and memory traffic."""
    times = core_times(part.core, device) + traffic_times(part.moved, device)
    for product in part.products:
        times += product_times(product, stream, device)
    return times


def core_times(core: PerAction, device: Device) -> PerAction:
    """Attention's products of activations."""
    if not core.forward:
        return core
    rate = device.tflops * device.attention_share * TERA / MICROSECONDS
    extra = device.kernel_latency or 0.0
    return PerAction(core.forward / rate + extra, core.backward_input / rate + extra, 0.0)


def product_times(product: Product, stream: Stream, device: Device) -> PerAction:
    """One linear layer. Narrow operands are cast, and stored twice: by rows and by columns."""
    dtype = stream.product_dtype if product.is_narrow else None
    operations = product.flops * MICROSECONDS / (device.rate(dtype) * TERA)
    if device.kernel_latency is None and dtype is None:
        return PerAction(operations, operations, operations)
    wide, groups = stream.dtype_bytes, product.groups
    input, output = product.rows * product.n_in * groups, product.rows * product.n_out * groups
    weight = float(product.n_in * product.n_out * groups)
    narrow = wide if dtype is None else PRODUCT_BYTES[dtype]
    operands, extra = input + output + weight, device.kernel_latency or 0.0

    def roofline(written: float) -> float:
        moved = narrow * (operands - written) + wide * written
        return extra + max(operations, device.moving(moved) if device.kernel_latency is not None else 0.0)

    cast = 0.0 if dtype is None else device.moving(wide + 2 * narrow)
    return PerAction(
        roofline(output) + cast * input,
        roofline(input) + cast * output,
        roofline(weight),
    )


def traffic_times(moved: PerAction, device: Device) -> PerAction:
    """Memory traffic; 0 if no bandwidth is given."""
    return moved.scaled(device.moving(1.0))


def exchange_times(exchanges: tuple[Exchange, ...], links: GroupLinks) -> PerAction:
    """Exchanges that compute does not hide."""
    times = PerAction()
    by_group: dict[str, PerAction] = {}
    for exchange in exchanges:
        if exchange.sent.forward or exchange.sent.backward_input:
            exposed = getattr(links, exchange.group).exposed(exchange.sent, exchange.calls)
            by_group[exchange.group] = by_group.get(exchange.group, NONE) + exposed
    for group, exposed in by_group.items():
        beside = by_group.get("expert_in_node", NONE) if group == "expert" else NONE
        if group == "expert_in_node" and "expert" in by_group:
            continue
        times += PerAction(
            max(exposed.forward, beside.forward),
            max(exposed.backward_input, beside.backward_input),
            exposed.backward_weight,
        )
    return times
