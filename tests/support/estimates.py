"""Configurations for tests of estimates: GPTs by name, random ones as a hypothesis strategy."""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import strategies as st
from pydantic import BaseModel
from zbv_models.estimate.config import EstimateConfig, parse_config
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import layer_kinds, shapes_of
from zbv_models.estimate.part import Part
from zbv_models.estimate.sections import with_presets
from zbv_models.estimate.shapes import Degrees

Document = dict[str, Any]
Config = TypeVar("Config", bound=BaseModel)

DEVICE = {
    **{"achieved_tflops": 100, "memory_bandwidth": 1000, "link_bandwidth": 50, "link_latency": 7},
    **{"tensor_parallel_bandwidth": 100, "tensor_parallel_latency": 5},
}


def but(config: Config, **changes: Any) -> Config:
    """A copy with changed values, which is not validated."""
    return config.model_copy(update=changes)


def gpt(**changes: Any) -> Transformer:
    """A GPT as the papers count it: 16 bits, plain attention, dropout, MLP of 4h."""
    given = {
        "hidden": 1024, "layers": 24, "heads": 16, "vocabulary": 51200, "sequence": 2048,
        "microbatch_size": 2, "attention": "plain", "dropout": True,
    }  # fmt: skip
    return Transformer.model_validate({**given, **changes})


def llama(**changes: Any) -> Transformer:
    """A transformer as Llama builds it: RMSNorm, gate, rotary positions, no biases, flash attention."""
    given = {
        "hidden": 4096, "layers": 32, "heads": 32, "vocabulary": 32000, "sequence": 4096, "gated": True,
        "norm": "rmsnorm", "bias": False, "positions": "rotary",
    }  # fmt: skip
    return Transformer.model_validate({**given, **changes})


def preset_config(name: str, **parallel: Any) -> EstimateConfig:
    return parse_config(with_presets({}, [name], {"parallel": parallel}))


def estimate_config(model: Transformer, **parallel: Any) -> EstimateConfig:
    """A model on the tests' device."""
    of_pipeline = {"pp_degree": 2, "microbatches": 4, **parallel}
    return parse_config({"model": model.model_dump(), "parallel": of_pipeline, "device": DEVICE})


def parts(model: Transformer, **degrees: Any) -> dict[str, Part]:
    """The parts of a model by name: embedding, attention, mlp or experts, head; of each kind the last one."""
    return {
        name: half.part(shapes_of(model, kind, Degrees(**degrees), model.microbatch_size))
        for kind in layer_kinds(model)
        for name, half in kind.halves
    }


FLAGS = ("gated", "tied_embeddings", "causal", "dropout", "bias", "post_norms", "qk_norm", "fused_activation")


def one_of(draw: st.DrawFn, *values: Any) -> Any:
    return draw(st.sampled_from(values))


@st.composite
def estimate_configs(draw: st.DrawFn, /, **fixed: Any) -> EstimateConfig:
    """Valid configurations of every kind, small enough to be read; ``fixed`` are parallel keys."""
    degree = fixed.get("tensor_parallel", one_of(draw, 1, 2, 4))
    kv_heads = degree * draw(st.integers(1, 2))
    width = 8 * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    plain = draw(st.booleans())
    model = Transformer(
        hidden=heads * width,
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=one_of(draw, None, 16),
        ffn=degree * draw(st.integers(1, 100)),
        vocabulary=degree * draw(st.integers(1, 500)),
        sequence=degree * draw(st.integers(1, 64)),
        microbatch_size=draw(st.integers(1, 3)),
        dtype=one_of(draw, "bfloat16", "float32"),
        attention="plain" if plain else "flash",
        norm=one_of(draw, "layernorm", "rmsnorm"),
        positions=one_of(draw, "learned", "rotary", "none"),
        **{name: draw(st.booleans()) for name in FLAGS},
    )
    parallel = {
        "tensor_parallel": degree,
        "sequence_parallel": draw(st.booleans()),
        "data_parallel": draw(st.integers(1, 8)),
        "zero_stage": draw(st.integers(0, 3)),
        "optimizer": one_of(draw, "adam", "lion", "sgd"),
        "precision": one_of(draw, None, "mixed-fp32-gradients", "half"),
        "recompute": one_of(draw, "none", "full", *(["selective"] if plain else [])),
        "granularity": one_of(draw, "block", "half"),
    }
    return estimate_config(model, **{**parallel, **fixed})


COMPRESSED = {"query_rank": 16, "output_groups": 2, "output_rank": 8, "ratio": 4, "chosen": 8}
VARIANTS = [
    {"letter": "a", "like": "*", "head_dim": 32, "kv_heads": 2, "value_dim": 8},
    {"letter": "b", "like": "-", "ffn": 48},
    {"letter": "c", "like": "*", "compressed": COMPRESSED, "head_dim": 16},
]


@st.composite
def modern_configs(draw: st.DrawFn) -> EstimateConfig:
    """Valid configurations with experts, latent attention, predictions, windows and shared sequences."""
    tensor, context, data, inside = (one_of(draw, *each) for each in ((1, 2), (1, 2), (2, 4), (1, 2)))
    is_latent, is_sparse = draw(st.booleans()), draw(st.booleans())
    layers = draw(st.integers(2, 5))
    sizes: dict[str, Any] = {
        "hidden": 64, "layers": layers, "heads": 4, "ffn": 96, "vocabulary": 200, "sequence": 64,
        "prediction_layers": draw(st.integers(0, 2)), "product_dtype": draw(st.sampled_from((None, "fp8"))),
        "fused_loss": draw(st.booleans()), "tied_embeddings": draw(st.booleans()),
        "post_norms": draw(st.booleans()),
    }  # fmt: skip
    sizes["window"] = draw(st.sampled_from((None, 16)))
    if sizes["window"] is not None:
        sizes |= draw(st.sampled_from(({}, {"chunked": True}, {"index_heads": 2, "index_dim": 8})))
    if is_latent:
        sizes |= {"kv_lora_rank": 16, "q_lora_rank": draw(st.sampled_from((None, 24)))}
        sizes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    else:
        sizes |= {"kv_heads": 2, "qk_norm": draw(st.booleans()), "output_gate": draw(st.booleans())}
    if is_sparse:
        sizes |= {"experts": 8, "experts_per_token": draw(st.sampled_from((3, 8))), "expert_ffn": 32}
        sizes |= {"shared_expert_ffn": draw(st.sampled_from((None, 48)))}
        sizes |= {"expert_hidden": draw(st.sampled_from((None, 32)))}
        sizes |= {"dense_layers": draw(st.integers(0, layers - 1)), "expert_every": 1}
    streams = ({"residual_streams": 3}, {"residual_sums": 4}, {"layer_inputs": 8}, {"head_gate": True})
    sizes |= one_of(draw, {}, *streams)
    if not is_sparse and draw(st.booleans()):
        sizes |= {"window": 16, "chunked": False, "index_heads": 2, "index_dim": 8, "variants": VARIANTS}
        sizes["pattern"] = "".join(one_of(draw, "(ab)", "(c-)", "(*b)", "(I-)") for _ in range(layers))
    parallel = {
        "tensor_parallel": tensor,
        "sequence_parallel": tensor > 1,
        "context_parallel": context,
        "context_exchange": draw(st.sampled_from(("ring", "all-gather"))),
        "expert_parallel": 2 if is_sparse else 1,
        "expert_parallel_in_node": inside if is_sparse else 1,
        "data_parallel": data,
        "zero_stage": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(("none", "full"))),
    }
    device = {**DEVICE, "kernel_latency": 6, "attention_share": 0.7, "fp8_tflops": 180}
    sections = {"model": llama(**sizes).model_dump(), "device": device}
    return parse_config({**sections, "parallel": {"pp_degree": 2, "microbatches": 4, **parallel}})
