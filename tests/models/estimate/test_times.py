"""Times of F, I and W: products by size, memory traffic, exchanges; what training keeps and does per step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from support.estimates import Document, but, estimate_config, llama, parts, preset_config
from zbv_models.estimate.config import PRECISIONS, EstimateConfig, estimate_layers, problem_document
from zbv_models.estimate.config import estimate_config as estimate
from zbv_models.estimate.device import Device
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.part import Product
from zbv_models.estimate.sections import preset
from zbv_models.estimate.shapes import Degrees, PerAction, Shapes, Stream
from zbv_models.estimate.state_space import GivenCosts
from zbv_models.estimate.states import StateBytes, StaticBytes, by_zero
from zbv_models.estimate.times import SUSTAINED_SHARE, core_times, filled_share, product_times
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

ACTIONS = ("forward", "backward_input", "backward_weight")
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SPARSE = {"hidden": 1024, "heads": 8, "experts": 16, "experts_per_token": 4, "expert_ffn": 512}
FAST = Device(achieved_tflops=400.0, memory_bandwidth=2000.0, kernel_latency=6.0, fp8_tflops=800.0)
MEASURED = [
    (1, 512, 256, 256, 11.5), (1, 1024, 2048, 256, 139.5), (1, 4096, 512, 512, 238.8),
    (2, 1024, 2048, 1024, 493.4), (1, 4096, 1024, 1024, 488.1), (1, 2048, 2048, 2048, 632.0),
    (1, 4096, 4096, 256, 392.2), (2, 4096, 512, 256, 211.0), (4, 4096, 1024, 1024, 673.8),
    (4, 4096, 4096, 256, 503.9), (2, 2048, 4096, 1024, 678.7), (1, 4096, 4096, 4096, 783.3),
    (4, 4096, 4096, 4096, 793.1), (4, 2048, 1024, 2048, 710.6), (1, 1024, 256, 1024, 68.3),
]  # fmt: skip
"""Products of H100 in bfloat16: how many at once, rows, columns, depth, TFLOP/s (openxla/xla,
xla/service/gpu/model/matmul_interpolator_data.h, sm_90)."""

MI300X = Device.model_validate(preset("mi300x").device)
GROUPED = [
    (8, 2048, 4096, 7168, 1.88, 4.70), (8, 8192, 7168, 2048, 3.72, 8.34), (32, 2048, 7168, 2048, 3.94, 10.01),
    (32, 8192, 4096, 7168, 29.96, 69.36), (4, 2048, 4096, 4096, 0.54, 1.47),
    (4, 8192, 8192, 4096, 4.17, 9.57), (16, 2048, 8192, 4096, 4.28, 11.02),
    (16, 8192, 4096, 4096, 8.39, 20.17),
]  # fmt: skip
"""Products of experts on MI300X in bfloat16: how many at once, rows, columns, depth, ms of F and of the
backward, which also adds both gradients (AMD-AGI/Primus-Turbo@221d75f1, output/baseline_grouped_gemm.csv)."""


def layers(config: EstimateConfig, **device: Any) -> dict[str, LayerEstimate]:
    """The layers on the device with some changes."""
    made = estimate_layers(but(config, device=but(config.device, **device)))
    return {layer.name: layer for layer in made}


def as_tuple(times: PerAction) -> tuple[float, ...]:
    return tuple(getattr(times, action) for action in ACTIONS)


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


@pytest.mark.parametrize(("groups", "rows", "n_out", "n_in", "forward", "backward"), GROUPED)
def test_products_of_experts_have_the_measured_rates(
    groups: int, rows: int, n_out: int, n_in: int, forward: float, backward: float
) -> None:
    found = product_times(Product(rows, n_in, n_out, groups), Stream(1), MI300X).total
    added = MI300X.streaming(3 * 2 * groups * n_in * (rows + n_out))
    assert (found + added) / 1000 == pytest.approx(forward + backward, rel=0.1)


def test_products_that_run_as_one_kernel_have_a_share_of_the_rate() -> None:
    one, two = (product_times(Product(4096, 4096, 4096, count), Stream(1), FAST) for count in (1, 2))
    slow = product_times(
        Product(4096, 4096, 4096, 2), Stream(1), FAST.model_copy(update={"grouped_share": 0.5})
    )
    assert slow.forward - 6 == pytest.approx(2 * (two.forward - 6)) == pytest.approx(4 * (one.forward - 6))


@pytest.mark.parametrize("device", [None, "a100"])
@pytest.mark.parametrize("name", ["gpt-1.5b", "gpt-6.2b", "gpt-14.6b", "gpt-28.3b"])
def test_times_and_memory_match_the_zero_bubble_paper(name: str, device: str | None) -> None:
    """Qi et al. 2023, table 9: four models, one device; each of F, I, W within 13 %, their sum within 5 %.

    Table 4, within 5 %: the fullest rank of 1F1B is the second, which holds p - 1 microbatches of one block
    more than the first; ZB-2p holds up to 2p - 1 there, p more than 1F1B.
    """
    config, measured = preset_config(name), preset(name).published
    if device is not None:
        config = but(config, device=Device.model_validate(preset(device).device))
    block, blocks = layers(config)["block"], measured["stage_layers"]
    found = [blocks * time / 1e3 for time in as_tuple(block.plain.times)]
    profiled = [measured["profiled_ms"][action] for action in ACTIONS]
    assert found == pytest.approx(profiled, rel=0.13)
    assert sum(found) == pytest.approx(sum(profiled), rel=0.05)
    p, held, gb = config.parallel.pp_degree, blocks * block.plain.after_forward / 1e9, measured["memory_gb"]
    assert blocks * block.static.total / 1e9 + (p - 1) * held == pytest.approx(gb["1f1b"], rel=0.05)
    assert p * held == pytest.approx(gb["zb-2p"] - gb["1f1b"], rel=0.06)
    if device is None:
        problem = parse_any_problem(problem_document(config))
        assert isinstance(problem, LayeredProblem)
        assert problem.link is not None
        transfer = problem.link.latency + block.output_bytes / problem.link.bandwidth
        assert transfer / 1e3 == pytest.approx(measured["profiled_ms"]["p2p"], rel=0.08)


def test_narrow_operands_are_faster_but_must_be_cast() -> None:
    product = Product(8192, 8192, 8192)
    slow, fast = (product_times(product, Stream(8192, product_dtype=of), FAST) for of in (None, "fp8"))
    cast = 8192**2 * (2 + 2 * 1) / 2000e9 * 1e6
    assert slow.backward_weight - 6 == pytest.approx(2 * (fast.backward_weight - 6))
    assert slow.forward - 6 == pytest.approx(2 * (fast.forward - cast - 6))


def test_narrow_products_gain_less_than_their_rates() -> None:
    """A block of 4096, with MLPs of 16384 and 31 x 512 tokens, on B300: 12.9 ms in bfloat16, 1.44 times as
    fast in FP8 and 2.03 times in NVFP4 (NVIDIA, Transformer Engine, "GEMM Speedups Across Precisions")."""
    b300 = Device.model_validate(preset("b300").device)
    sizes = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))

    def total(dtype: str | None) -> float:
        stream = Stream(4096, product_dtype=dtype)
        return sum(product_times(Product(31 * 512, *size), stream, b300).total for size in sizes) / 1000

    assert total(None) == pytest.approx(12.9, rel=0.1)
    assert total("fp8") / total("fp4") == pytest.approx(2.03 / 1.44, rel=0.1)
    assert 2.03 <= total(None) / total("fp4") <= 2.5
    assert 1.44 <= total(None) / total("fp8") <= 1.6


def test_a_block_of_few_tokens_takes_its_kernels_and_with_experts_many_more() -> None:
    """A block has about 20 kernels in the forward and 30 in the backward (Ivanov et al. 2021, §3)."""

    def kernels(**changes: Any) -> float:
        config = estimate_config(llama(sequence=8, **changes))
        found = [layers(config, kernel_latency=latency) for latency in (0.0, 6.0)]
        names = found[0].keys() & {"block", "moe"}
        (times,) = [[of[name].plain.times.total for of in found] for name in names]
        return (times[1] - times[0]) / 6

    dense = kernels()
    assert 35 <= dense <= 55
    assert kernels(**SPARSE) > 2 * dense


def test_biases_of_experts_pass_every_result_through_float32() -> None:
    """Of a value, F moves at least its bias times a weight, in float32, and that sum, written and read."""
    with_biases, without = (parts(llama(bias=bias, **SPARSE))["experts"] for bias in (True, False))
    results = 4096 * 4 * 1024  # tokens, experts of each, width
    added = with_biases.moved + without.moved.scaled(-1)
    assert added.forward >= (4 + 4 + 4) * results
    assert added.backward_input >= added.forward


def test_a_scan_has_a_fraction_of_the_rate_of_products() -> None:
    """A tuned kernel of Mamba-2's scan has 28 TFLOP/s in F on H100 PCIe (tile-ai/tilelang, issue 707)."""
    h100 = Device.model_validate(preset("h100").device)
    part = GivenCosts(parameters=0, flops=0.0, core_flops=1e7).part(Shapes(Stream(1024), 4096, 1, Degrees()))
    assert part.core.forward / core_times(part, h100).forward / 1e6 == pytest.approx(28, rel=0.1)


def test_fused_gradients_make_w_of_few_tokens_longer_but_not_by_a_kernel() -> None:
    """4, 8 and 2 + 10 bytes: read and written; the gradient of the product, and its addition."""
    times = []
    wide = "mixed-fp32-gradients"
    for precision, fused in (("mixed", True), (wide, True), (wide, False)):
        config = estimate_config(llama(sequence=128), precision=precision, fused_gradients=fused)
        block = layers(config, kernel_latency=6.0, achieved_tflops=10000.0)["block"]
        times.append(block.plain.times.backward_weight)
    added = 4 * (4 * 4096**2 + 3 * 4096 * 4 * 4096) / 1000e9 * 1e6
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([added, added])


def test_flash_attention_has_a_share_of_the_rate_and_launches_that_wait_lengthen_actions() -> None:
    config = preset_config("llama-3.1-8b")
    core = parts(config.model)["attention"].core
    choices = ((0.5, 0.0), (1.0, 0.0), (1.0, 2.0))
    slower, block, waiting = (
        layers(config, attention_share=share, launch_time=time)["block"] for share, time in choices
    )
    added = slower.plain.times.forward - block.plain.times.forward
    assert added == pytest.approx(core.forward / 600e12 * 1e6)
    longer = as_tuple(waiting.plain.times + block.plain.times.scaled(-1))
    assert longer == pytest.approx((2 * 20, 2 * 20, 2 * 10))  # two halves
    assert waiting.shares.launches == pytest.approx(2 * 50)


def test_heads_whose_keys_and_values_differ_may_be_slower() -> None:
    """MI300X takes 18.96 ms for F and I of 128 heads and 4096 tokens (baseline_attention.csv, row 61)."""
    latent = preset_config("deepseek-v3")
    for config, is_uneven in ((latent, True), (preset_config("llama-3.1-8b"), False)):
        part = parts(config.model)["attention"]
        assert part.is_uneven is is_uneven
        slow, fast = (
            core_times(part, MI300X.model_copy(update={"uneven_attention_share": share})).forward - 6
            for share in (0.305, None)
        )
        assert slow / fast == pytest.approx(2.0 if is_uneven else 1.0)
    found = core_times(parts(latent.model)["attention"], MI300X).total / 1000
    assert found == pytest.approx(1.73 + 17.23, rel=0.02)


def test_misaligned_heads_are_slow_in_plain_attention_only() -> None:
    """100 values of 2 bytes do not fill 16 bytes evenly; 104 do."""
    config = preset_config("gpt-3-175b")
    for attention, low, high in (("plain", 1.1, 2), ("flash", 0.5, 1)):
        models = (but(config.model, head_dim=width, attention=attention) for width in (100, 104))
        odd, even = (layers(but(config, model=model))["block"].plain.times.forward for model in models)
        assert low < odd / even < high


def test_the_last_wave_of_tiles_counts_as_a_full_one() -> None:
    for rows, columns, groups, processors, share in (
        (256 * 10, 128 * 10, 1, 100, 1.0),
        (256 * 101, 128, 1, 100, 0.75 * 101 / 125),  # 404 tiles of 64 x 128 in five waves of 400 / 4
        (256 * 10, 128, 10, 100, 1.0),  # products of experts run at once
        (256 * 101, 128, 1, None, 1.0),
        (65, 65, 1, 1, 0.9 * 65**2 / 128**2),  # no part of a tile
    ):
        device = Device(achieved_tflops=100.0, processors=processors)
        assert filled_share(rows, columns, groups, device) == pytest.approx(share)


def test_embedding_and_head_move_tables_and_logits() -> None:
    """The embedding copies rows; the gradient of its table is zeroed, filled and added."""
    found = layers(estimate_config(llama(), precision="mixed-fp32-gradients"))
    row, table, logits = 2 * 4096 * 4096, 4096 * 32000, 4096 * 32000
    embedding, head = found["embedding"].plain.times, found["head"].plain.times
    per_byte, product = 1e6 / 1000e9, head.backward_weight
    assert embedding.forward == pytest.approx(2 * row * per_byte)
    assert embedding.backward_weight == pytest.approx((2 * row + table * (2 * 2 + 2 * 4)) * per_byte)
    assert head.forward - product == pytest.approx((2 * row + (2 + 9 * 4) * logits) * per_byte)
    assert head.backward_input - product == pytest.approx((3 * row + (3 * 4 + 2) * logits) * per_byte)


@pytest.mark.parametrize(("name", "sequence_parallel", "passes", "calls"), [
    # An all-reduce of the stream in each half has two passes of the ring, a gather or a scatter one.
    ("block", False, (4, 4, 0), (2, 2, 0)),
    ("block", True, (4, 4, 2), (4, 4, 2)),
    # The embedding sums parts of the vocabulary in F, and the head its input's gradient in I.
    ("embedding", False, (2, 0, 0), (1, 0, 0)),
    ("embedding", True, (1, 1, 0), (1, 1, 0)),
    ("head", False, (0, 2, 0), (0, 1, 0)),
    ("head", True, (1, 1, 1), (1, 1, 1)),
])  # fmt: skip
def test_ring_times(
    name: str, sequence_parallel: bool, passes: tuple[int, ...], calls: tuple[int, ...]
) -> None:
    """A pass of four devices sends 3/4 of the stream at 100 GB/s in three steps; a call costs 5 us."""
    config = estimate_config(llama(), tensor_parallel=4, sequence_parallel=sequence_parallel)
    found = layers(config, tensor_parallel_step_latency=2.0, memory_bandwidth=None)[name]
    ring = 2 * 4096 * 4096 * 3 / 4 / 100e9 * 1e6 + 3 * 2.0
    expected = [pass_ * ring + call * 5 for pass_, call in zip(passes, calls, strict=True)]
    assert as_tuple(found.exchanged) == pytest.approx(expected)
    compute = found.flops.scaled(1e6 / 100e12)
    assert as_tuple(found.plain.times) == pytest.approx(as_tuple(compute + found.exchanged))
    assert layers(config, tensor_parallel_overlap=1.0)[name].exchanged == PerAction()
    alone = but(config, parallel=but(config.parallel, tensor_parallel=1, sequence_parallel=False))
    assert layers(alone)[name].exchanged == PerAction()
    # Latent vectors are gathered in as many steps.
    latent = but(config, model=llama(**LATENT))
    slow, fast = (layers(latent, tensor_parallel_step_latency=each)[name].exchanged for each in (2.0, 0.0))
    assert as_tuple(slow + fast.scaled(-1)) == pytest.approx([each * 3 * 2.0 for each in passes])


@pytest.mark.parametrize(("model", "parallel", "device", "sent", "rate"), [
    # Dispatch and combination of four copies, 3 of 4 of which go elsewhere.
    (SPARSE, {"data_parallel": 4, "expert_parallel": 4}, {}, 2 * 4 * 1024 * 3 / 4, (50, 2 * 7)),
    (SPARSE, {"data_parallel": 4, "expert_parallel": 4},
     {"expert_parallel_bandwidth": 10.0, "expert_parallel_latency": 1.0}, 2 * 4 * 1024 * 3 / 4, (10, 2)),
    # Exchanges inside a node, half as long here, take place at the same time.
    (SPARSE, {"data_parallel": 8, "expert_parallel": 8, "expert_parallel_in_node": 2}, {},
     2 * 1024 * 4 * (1 - 0.75**4) * 3 / 4, (50, 2 * 7)),
    ({"kv_heads": 8}, {"context_parallel": 4}, {}, 3 / 4 * 2 * 8 * 128, (50, 3 * 7)),
    ({"kv_heads": 8}, {"context_parallel": 4}, {"context_parallel_overlap": 1.0}, 0, (50, 0)),
    (SPARSE, {"data_parallel": 4, "expert_parallel": 4}, {"expert_parallel_overlap": 1.0}, 0, (50, 0)),
])  # fmt: skip
def test_exchanges(model: Document, parallel: Document, device: Document, sent: float, rate: Any) -> None:
    """``sent`` is values per token, ``rate`` GB/s and microseconds of calls."""
    block = list(layers(estimate_config(llama(**model), **parallel), **device).values())[1]
    assert block.exchanged.forward == pytest.approx(2 * 4096 * sent / rate[0] / 1e9 * 1e6 + rate[1])


DATA = {"data_parallel_bandwidth": 20.0, "data_parallel_latency": 3.0}


def held(precision: str, optimizer: str, count: int = 1, stage: int = 0, replicas: int = 1) -> StaticBytes:
    state = StateBytes(**PRECISIONS[precision].model_dump(), optimizer=optimizer)
    return by_zero(state, stage).of(count, replicas)


def test_bytes_per_parameter_and_those_of_zero_on_7_5_billion_and_64_replicas() -> None:
    """Of parameters, gradients and states. Rajbhandari et al. 2020, figure 1, for the stages of ZeRO."""
    of_adam = {"mixed": (2, 2, 12), "mixed-fp32-gradients": (2, 4, 12), "bf16-states": (2, 4, 8),
               "fp8-states": (2, 4, 6), "single": (4, 4, 8), "half": (2, 2, 4)}  # fmt: skip
    for name, sizes in of_adam.items():
        assert held(name, "adam") == StaticBytes(*sizes)
    states = [held("mixed", optimizer).optimizer for optimizer in ("muon", "lion", "sgd")]
    assert [*states, held("single", "sgd").optimizer] == [8, 8, 4, 0]
    gigabytes = [held("mixed", "adam", 7_500_000_000, stage, 64).total / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_muon_leaves_the_tables_to_adam() -> None:
    """Megatron-LM, ``_is_nonlinear_or_embedding``: matrices of blocks have one state, tables two."""
    shared = {"zero_stage": 1, "data_parallel": 4}
    configs = (estimate_config(llama(layers=2), optimizer=name, **shared) for name in ("adam", "muon"))
    adam, muon = map(estimate_layers, configs)
    assert muon[0] == adam[0]
    less = [first.static.optimizer - then.static.optimizer for first, then in zip(adam, muon, strict=True)]
    assert less[1] == pytest.approx(4 * adam[1].parameters / 4, abs=4)
    assert less[2] == 4 * 4096 / 4  # the norm


def test_replicas_of_experts_share_their_optimizer() -> None:
    """Eight replicas with eight-way expert parallelism have no copies of experts, so ZeRO saves nothing."""
    model = llama(**SPARSE)
    whole = parts(model)["attention"].parameters.total + parts(model)["experts"].parameters.replicated
    for replicas, stage, dense, experts in ((8, 0, 1, 1), (8, 1, 8, 1), (16, 1, 16, 2)):
        parallel = {"data_parallel": replicas, "expert_parallel": 8, "zero_stage": stage}
        kept = estimate_layers(estimate_config(model, **parallel))[1].static.optimizer
        of_experts = 12 * (16 // 8) * 3 * 1024 * 512 / experts
        assert kept == pytest.approx(12 * whole / dense + of_experts, abs=2)


def block(stage: int, device: dict[str, float] | None = None, **changes: Any) -> LayerEstimate:
    """Of four replicas. Gradients have 2 bytes, as in the papers."""
    parallel = {"data_parallel": 4, "zero_stage": stage, "precision": "mixed", **changes}
    made = layers(estimate_config(llama(layers=2), **parallel), **{**DATA, **(device or {})})
    return list(made.values())[-2]


COUNT = block(0).parameters
SHARE = 2 * COUNT * 3 / 4
"""Bytes of gradients or parameters that a device sends once."""


@pytest.mark.parametrize(("stage", "reduction", "gathering", "forward", "weight"), [
    (0, 2 * SHARE, 0, 0, 0),  # an all-reduce sends gradients twice
    (1, SHARE, SHARE, 0, 0),
    (2, 0, SHARE, 0, SHARE),  # shared gradients are reduced in every W
    (3, 0, 0, SHARE, SHARE),  # shared parameters are gathered in every F and I: 3 Ψ
])  # fmt: skip
def test_zero_traffic(stage: int, reduction: float, gathering: float, forward: float, weight: float) -> None:
    """Rajbhandari et al. 2020, §7; compute hides none here, because the overlap is 0."""
    layer = block(stage)
    longer = layer.plain.times + block(0).plain.times.scaled(-1)
    found = [layer.step.gradient_reduction, layer.step.parameter_gathering, *as_tuple(longer)]
    sizes = (reduction, gathering, forward, forward, weight)
    expected = [size / 20e9 * 1e6 + 2 * 3 if size else 0 for size in sizes]  # calls of both halves
    assert found == pytest.approx(expected, abs=1e-9)


def test_an_action_holds_what_it_gathers_and_hides_at_most_its_own_time() -> None:
    """A whole block is gathered at once, or half of it: of the MLP, 3 · 4096 · 16384 and a norm."""
    assert block(3).plain.workspace == block(1).plain.workspace + 2 * COUNT
    halves = [block(stage, granularity="half").plain.workspace for stage in (1, 3)]
    assert halves[1] == halves[0] + 2 * (3 * 4096 * 16384 + 4096)
    slow = block(3, {"data_parallel_overlap": 1.0, "data_parallel_bandwidth": 0.1})
    assert slow.plain.times.forward == pytest.approx(SHARE / 0.1e9 * 1e6 + 2 * 3)
    assert block(3, {"data_parallel_overlap": 1.0}).plain.times == block(1).plain.times
    # Devices that share a sequence are replicas, too.
    shared = block(1, data_parallel=2, context_parallel=2)
    assert (shared.static, shared.step) == (block(1).static, block(1).step)


@pytest.mark.parametrize(("stage", "precision", "per_parameter"), [
    # Gradients twice, master copy and two states both ways, parameters; gradients set to zero.
    (0, "mixed", 2 * 2 + 2 * 12 + 2 + 2),
    (0, "single", 2 * 4 + 2 * 8 + 2 * 4 + 4),
    # ZeRO divides the update, but not the gradients that every replica holds.
    (1, "mixed", (4 + 24 + 2) / 4 + 2),
    (2, "mixed", (4 + 24 + 2 + 2) / 4),
])  # fmt: skip
def test_the_optimizer_reads_and_writes_its_states(stage: int, precision: str, per_parameter: float) -> None:
    expected = COUNT * per_parameter / 1000e9 * 1e6
    assert block(stage, precision=precision).step.optimizer == pytest.approx(expected)
    faster = block(stage, {"product_bandwidth": 4000.0}, precision=precision)
    assert faster.step.optimizer == pytest.approx(expected / 4)
    assert faster.plain == block(stage, precision=precision).plain
    if precision == "mixed":
        # The host reads gradients, reads and writes copies and states, and returns parameters, in float32.
        shared = 4 if stage else 1
        moved = per_parameter - 2 * 12 / shared
        offloaded = block(stage, precision=precision, offloaded_states=1.0).step.optimizer
        assert offloaded == pytest.approx(COUNT * (moved / 1000e9 + (4 * 6 + 2 * 8) / shared / 38e9) * 1e6)


@pytest.mark.parametrize(("model", "placement", "copies"), [
    ({"tied_embeddings": True}, "loop", True), ({"prediction_layers": 1}, "loop", True),
    ({"tied_embeddings": True}, "v", False), ({}, "loop", False),
])  # fmt: skip
def test_copies_of_a_table_are_summed(model: Document, placement: str, copies: bool) -> None:
    """The ends of a V are on one rank."""
    made = estimate(estimate_config(llama(**model), placement=placement))
    assert made.table_reduction == pytest.approx((4 * 32000 * 4096 / 50e9 * 1e6 + 7) * copies)
