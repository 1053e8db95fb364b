"""Times of a part on a device, in microseconds, per microbatch and per step.

The time of F, I or W of a part is the sum of three: its matrix products, the memory traffic of all other
operations, and the exchanges with other devices that compute does not hide.

A product takes the longer of its operations at the device's rate and of its matrices through memory (the
roofline of Williams et al. 2009, §3), and a constant that does not depend on its size: launch and first
loads. Its output is computed in tiles, as many at once as the device has processors, and the last wave of
tiles is rarely full (NVIDIA, Matrix Multiplication Background, §4). One constant for all devices and shapes
describes the 58 shapes of a public table of H100 products with a mean error of 6 % (OpenXLA,
``xla/service/gpu/model/matmul_interpolator_data.h``, bfloat16, from 256 x 512 x 256 to 4 x 4096³): 6 us,
0.80 of the data sheet's rate and 2500 GB/s. The best rates of other devices are 0.5 to 0.87 of their data
sheets (Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS").

torchtitan's selective recomputation saves single operations of a block, and computes the rest again:
``torchtitan/distributed/activation_checkpoint.py``, ``SelectiveAC``: F keeps the block's input and outputs
of some operations. These are every second product (``aten.mm``: the first, the third and so on of a block),
products with a bias (``aten.addmm``), flash attention and the choice of experts (``topk``). The router's
product and those of routed experts (``aten._grouped_mm``) are computed again. So are exchanges:
``SelectiveAC`` saves functional collectives, but the default ``spmd_backend``, ``spmd_types``, has others.

Per step, a layer costs the exchange of gradients and parameters, and the optimizer. Replicas sum gradients
with an all-reduce, in which a device sends 2 (d - 1) / d of them. With ZeRO stage 1 they reduce and scatter
gradients, and gather updated parameters, each (d - 1) / d (Rajbhandari et al. 2020, §7). A replica that
holds only a share of the gradients between microbatches (stage 2) must reduce those of every microbatch in
W. One that holds only a share of the parameters (stage 3; FSDP, Zhao et al. 2023, §3) also gathers them in
F and again in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from zbv_models.estimate.device import GIGA, MICROSECONDS, TERA, Device, GroupLink, GroupLinks
from zbv_models.estimate.part import Exchange, Group, Linear, Part, Product
from zbv_models.estimate.shapes import NONE, PRODUCT_BYTES, PerAction, Stream, Summed
from zbv_models.estimate.states import FLOAT32_BYTES, HeldBytes, Share

KERNEL_LATENCY = 6.0
"""Microseconds of a product in addition to its operations; see above."""
SUSTAINED_SHARE = 0.92
"""What the products of a training step reach of the best measured rate of a device.

W consists of products alone. In the profile of four models on A100 (Qi et al. 2023, table 9), it takes 1.04
to 1.13 times as long as in full waves at the best rate, 271 TFLOP/s, and in the mean 1.09 times.
"""
TRAFFIC_SHARE = 0.41
"""What memory traffic reaches of a data sheet's bandwidth, so that F and I fit the same profile."""
ATTENTION_SHARE, ULTRA_ATTENTION_SHARE = 0.7, 0.82
"""Rate of flash attention over that of large products, with a causal mask; assumed.

The best published rates, for long sequences without a mask, are 0.73 of the data sheet in F and 0.63 in I on
A100 (Dao 2023, §4.1), and 0.75 in F on H100 (Shah et al. 2024, abstract): 0.85, 0.72 and 0.93 of the best
rate of products. Blackwell Ultra computes 10.7 instead of 5 T exponentials/s (NVIDIA, Inside NVIDIA Blackwell
Ultra): at 1640 TFLOP/s, with 512 and 1280 operations per score in F and I (heads of 128) and an exponential
in each, Blackwell takes 1.17 times as long, if exponentials and products do not overlap.
"""
MISALIGNED_SHARE = 0.04
"""Rate of attention's products over that of large ones, if rows do not start at multiples of 16 bytes.

BigScience's tables of heads (bigscience-workshop/bigscience, ``train/tr11-176B-ml/chronicles-prequel.md``,
"NHEADs"): heads of 108 instead of 144 values lengthen a step of 125 s on 384 A100 by 38 s.
"""
SCAN_SHARE = 0.04
"""Rate of a scan's products over that of large ones.

Fitted to runs of Nemotron 3 Nano (docs/benchmarks.md, "Published runs"). A tuned kernel of Mamba-2's scan
reaches 28 TFLOP/s in F on H100 PCIe (tile-ai/tilelang, issue 707), 0.04 of the data sheet.
"""


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))
"""Rows, columns and rate of the tiles of which a product's kernel has one; the fastest is taken.

The sizes are those of NVIDIA, Matrix Multiplication Background, §4, which also says that smaller tiles reuse
less and are slower, but not by how much: that is assumed.
"""
KERNELS = PerAction(10.0, 10.0, 5.0)
"""Kernels of a part: a block has about 20 in the forward and 30 in the backward (Ivanov et al. 2021, §3)."""
SMALL_KERNELS = PerAction(6.0, 6.0, 2.0)
"""Those that are neither products nor attention. Each takes the same constant as a product, in addition to
its memory traffic."""
ROUTING_KERNELS = PerAction(40.0, 40.0, 20.0)
"""Small kernels that a part with experts has in addition: scores, the choice of experts, counting and
sorting, copies of indices. Their number is fitted to runs (docs/benchmarks.md, "Published runs")."""


@dataclass(frozen=True)
class TimeShares(Summed):
    """What F, I and W of a microbatch consist of together, in microseconds."""

    products: float = 0.0
    attention: float = 0.0
    memory_traffic: float = 0.0
    launches: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    data_parallel: float = 0.0


def compute_times(
    part: Part, stream: Stream, device: Device, accumulated: float = 0.0
) -> tuple[PerAction, TimeShares]:
    """Products and memory traffic; ``accumulated`` is the size of a gradient to which W's products add."""
    products, core = NONE, core_times(part, device)
    for product in part.products:
        products += product_times(product, stream, device, accumulated)
    # Traffic takes no time if no bandwidth is given.
    moved = part.moved.scaled(device.moving(1.0)) + part.streamed.scaled(device.streaming(1.0))
    launches = _launch_times(part, device)
    shares = TimeShares(products.total, core.total, moved.total, launches.total)
    return core + moved + products + launches, shares


def _launch_times(part: Part, device: Device) -> PerAction:
    """What kernels take in addition to their traffic; products and attention have theirs already."""
    small = SMALL_KERNELS + ROUTING_KERNELS if part.is_routed else SMALL_KERNELS
    time = KERNELS.scaled(device.launch_time) + small.scaled(device.kernel_latency or 0.0)
    has_weights = part.is_differentiated and part.trained.total > 0
    return PerAction(
        time.forward, time.backward_input * part.is_differentiated, time.backward_weight * has_weights
    )


def accumulated_bytes(gradient_bytes: float) -> float:
    """Size of an accumulated gradient; the rest are gradients that are not accumulated yet."""
    return min(gradient_bytes, FLOAT32_BYTES)


def adding_time(part: Part, gradient_bytes: float, stream: Stream, device: Device) -> PerAction:
    """Gradients of W's products are read and added to the accumulated ones, in a separate kernel."""
    added = sum(each.n_in * each.n_out * each.groups for each in part.products if each.has_weight_gradient)
    moved = 2 * accumulated_bytes(gradient_bytes) + stream.dtype_bytes
    return PerAction(backward_weight=device.streaming(added * moved))


def core_times(part: Part, device: Device) -> PerAction:
    """Attention's products of activations."""
    core = part.core
    if not core.forward:
        return core
    uneven = device.uneven_attention_share if part.is_uneven else None
    share = (uneven or device.attention_share) if part.is_flash else 1.0
    if device.kernel_latency is not None:
        share = MISALIGNED_SHARE if part.is_misaligned else SCAN_SHARE if part.is_scan else share
    rate = device.achieved_tflops * TERA / MICROSECONDS * share
    extra = device.kernel_latency or 0.0
    again = core.backward_input / rate + extra if core.backward_input else 0.0
    return PerAction(core.forward / rate + extra, again, 0.0)


def repeated_time(
    part: Part, chosen: frozenset[str], stream: Stream, device: Device, links: GroupLinks
) -> float:
    """Time of the modules that selective recomputation repeats in I."""
    time = 0.0
    for module in part.modules:
        if module.name not in chosen or module.within in chosen:
            continue
        time += device.moving(module.moved) + exchange_times(module.exchanges, links)[0].forward
        time += sum(product_times(product, stream, device).forward for product in module.products)
        if module.has_core:
            time += core_times(part, device).forward
    return time


def product_times(product: Product, stream: Stream, device: Device, accumulated: float = 0.0) -> PerAction:
    """One linear layer. Narrow operands are cast, and stored twice: by rows, and for W by columns.

    If W adds to an accumulated gradient, it reads and writes that (Megatron-LM,
    ``wgrad_gemm_accum_fp32``); otherwise it writes a value of the stream's type.
    """
    dtype = stream.product_dtype if product.is_narrow else None
    share = device.grouped_share if product.groups > 1 else 1.0
    operations = product.flops * MICROSECONDS / (device.rate(dtype) * share * TERA)
    if device.kernel_latency is None and dtype is None:
        return product.of_actions.scaled(operations)
    wide, groups = stream.dtype_bytes, product.groups
    input, output = product.rows * product.n_in * groups, product.rows * product.n_out * groups
    weight = float(product.n_in * product.n_out * groups)
    narrow = wide if dtype is None else PRODUCT_BYTES[dtype]
    operands, has_size = input + output + weight, device.kernel_latency is not None
    extra = device.kernel_latency or 0.0

    def roofline(written: float, rows: float, columns: float, size: float = wide) -> float:
        moved = narrow * (operands - written) + size * written
        computed = operations / filled_share(rows, columns, groups, device)
        return extra + max(computed, device.streaming(moved) if has_size else 0.0)

    stored = (1 + product.has_weight_gradient) * narrow
    reads = 2 if dtype == "fp4" else 1  # the scale of an NVFP4 tensor is that of its largest value
    cast = 0.0 if dtype is None else device.moving(reads * wide + stored)
    has_input, has_weight = product.has_input_gradient, product.has_weight_gradient
    return PerAction(
        roofline(output, product.rows, product.n_out) + cast * input,
        roofline(input, product.rows, product.n_in) + cast * output if has_input else 0.0,
        roofline(weight, product.n_in, product.n_out, 2 * accumulated or wide) if has_weight else 0.0,
    )


def filled_share(rows: float, columns: float, groups: int, device: Device) -> float:
    """What a product with this output reaches of a device's rate: its last wave of tiles is not full."""
    if device.processors is None:
        return 1.0
    best = 0.0
    for height, width, rate in TILES:
        tiles = groups * ceil(rows / height) * ceil(columns / width)
        waves = ceil(tiles / device.processors)
        computed = waves * device.processors * height * width
        best = max(best, rate * groups * rows * columns / computed)
    return best


def exchange_times(exchanges: tuple[Exchange, ...], links: GroupLinks) -> tuple[PerAction, TimeShares]:
    """Exchanges that compute does not hide. Those of experts between and inside nodes take place at once."""
    by_group: dict[str, PerAction] = {}
    for exchange in exchanges:
        if exchange.sent.forward or exchange.sent.backward_input:
            exposed = getattr(links, exchange.group).exposed(exchange.sent, exchange.calls, exchange.steps)
            by_group[exchange.group] = by_group.get(exchange.group, NONE) + exposed
    tensor, context = by_group.get("tensor", NONE), by_group.get("context", NONE)
    between, inside = by_group.get("expert", NONE), by_group.get("expert_in_node", NONE)
    experts = PerAction(
        max(between.forward, inside.forward), max(between.backward_input, inside.backward_input)
    )
    shares = TimeShares(
        tensor_parallel=tensor.total, context_parallel=context.total, expert_parallel=experts.total
    )
    return tensor + context + experts, shares


HIDDEN: dict[str, frozenset[Group]] = {
    "none": frozenset(),
    "experts": frozenset(("expert", "expert_in_node")),
    "all": frozenset(("expert", "expert_in_node", "tensor", "context")),
}
"""The groups whose exchanges a pair of a forward and a backward hides, by what is asked for.

DualPipe hides the all-to-all of experts (DeepSeek-AI 2024b, §3.2.1), and so do Megatron-LM
(``--overlap-moe-expert-parallel-comm``) and torchtitan's DualPipeV. None of them hides collectives of
tensor or context parallelism in this way. Two streams could: then it is ``all``.
"""


def hidden_times(exchanges: tuple[Exchange, ...], links: GroupLinks, pairs: str) -> PerAction:
    """The part of F and I that is exchanges which a pair hides."""
    found, _ = exchange_times(tuple(each for each in exchanges if each.group in HIDDEN[pairs]), links)
    return PerAction(found.forward, found.backward_input)


OPERATIONS = frozenset(("op",))
"""The name of this recomputation among modules."""


def is_known(parts: Iterable[Part]) -> bool:
    """Whether torchtitan has such a block."""
    return all(part.saved is not None for part in parts)


def saved_bytes(parts: list[Part]) -> int:
    """Bytes that F keeps of a block."""
    kept = parts[0].input_bytes + sum(part.saved or 0 for part in parts)
    return kept + sum(linear.output_bytes for linear in _saved(parts))


def saved_time(parts: list[Part], stream: Stream, device: Device) -> float:
    """Microseconds of F that are not repeated."""
    cores = sum(core_times(part, device).forward for part in parts)
    return cores + sum(product_times(linear.product, stream, device).forward for linear in _saved(parts))


def _saved(parts: list[Part]) -> Iterator[Linear]:
    """The linear layers whose output is saved."""
    counted = 0
    for linear in (each for part in parts for each in part.linears):
        counted += not linear.has_bias
        if linear.has_bias or counted % 2 == 1:
            yield linear


HOST_BANDWIDTH = 38.0
"""GB/s of a device's share of its host's memory, for states that the host updates; assumed: half of 614 GB/s,
16 channels of DDR5-4800, for 8 devices."""


@dataclass(frozen=True)
class StepTimes(Summed):
    """Microseconds per step of one layer on one device."""

    gradient_reduction: float = 0.0
    parameter_gathering: float = 0.0
    """What the replicas exchange once per step and compute does not hide."""
    optimizer: float = 0.0
    """Memory traffic of the norm of gradients, of the update, and of setting gradients to zero; and Muon's
    products."""


def step_times(shares: tuple[Share, ...], zero_stage: int, device: Device, links: GroupLinks) -> StepTimes:
    """What a layer costs per step."""
    reduction = gathering = moved = hosted = 0.0
    for each in shares:
        kept, link = each.kept, _link(each, links)
        steps = each.replicas - 1
        sent, exposed = steps / each.replicas * each.count, 1 - link.overlap
        if zero_stage < 2:
            passes = 1 if zero_stage else 2
            reduction += exposed * link.time(passes * sent * kept.reduced, passes * steps)
        if 0 < zero_stage < 3:
            gathering += exposed * link.time(sent * kept.gathered, steps)
        updated = each.count / (each.replicas if zero_stage else 1)
        moved += updated * kept.updated + kept.of(each.count, each.replicas).gradients
        hosted += updated * kept.hosted
    on_host = hosted * MICROSECONDS / (HOST_BANDWIDTH * GIGA)
    return StepTimes(reduction, gathering, device.streaming(moved) + on_host)


def _link(share: Share, links: GroupLinks) -> GroupLink:
    return links.expert_data if share.is_expert else links.data


def microbatch_times(
    shares: tuple[Share, ...], zero_stage: int, compute: PerAction, links: GroupLinks
) -> PerAction:
    """Time of the replicas' exchanges in each F, I and W; compute hides at most its own duration."""
    if zero_stage < 2:
        return PerAction()

    def exposed(size_of: Callable[[HeldBytes], float], hiding: float) -> float:
        found = 0.0
        for each in shares:
            link, steps = _link(each, links), each.replicas - 1
            time = link.time(steps / each.replicas * each.count * size_of(each.kept), steps)
            found += max(time * (1 - link.overlap), time - hiding)
        return found

    def gathered(kept: HeldBytes) -> float:
        return kept.gathered if zero_stage == 3 else 0.0

    return PerAction(
        exposed(gathered, compute.forward),
        exposed(gathered, compute.backward_input),
        exposed(lambda kept: kept.reduced, compute.backward_weight),
    )


def buffer_bytes(shares: tuple[Share, ...]) -> int:
    """Workspace of a layer while replicas exchange its parameters or gradients."""
    return int(sum(each.count * each.kept.buffers for each in shares if each.replicas > 1))
