"""The rules between several numbers of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import Issue
from zbv_solver.problem.limits import MAX_LAYERS

from zbv_models.estimate.config_device import DeviceConfig
from zbv_models.estimate.config_model import ModelConfig, VisionConfig
from zbv_models.estimate.config_parallel import PRECISIONS, ParallelConfig

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def broken_rules(model: ModelConfig, parallel: ParallelConfig, device: DeviceConfig) -> list[Issue]:
    """One issue per broken rule; pointers are into the configuration."""
    return [
        *_attention_issues(model),
        *_expert_issues(model),
        *_pattern_issues(model),
        *_count_issues(model, parallel),
        *_tensor_issues(model, parallel),
        *_context_issues(model, parallel),
        *_expert_parallel_issues(model, parallel),
        *_device_issues(model, parallel, device),
    ]


def _attention_issues(model: ModelConfig) -> Iterator[Issue]:
    latent = model.kv_lora_rank is not None
    if model.head_dim is None and not latent and model.hidden % model.heads:
        rule = f"must divide hidden ({model.hidden}). Or give head_dim, their width."
        yield Issue("/model/heads", f"found {model.heads}; {rule}")
    if model.heads % model.n_kv_heads:
        rule = f"must divide heads ({model.heads}): each serves as many of them."
        yield Issue("/model/kv_heads", f"found {model.kv_heads}; {rule}")
    for key in LATENT if latent else ():
        if getattr(model, key) is None:
            detail = "this key is absent, and latent attention (kv_lora_rank) needs it."
            yield Issue(f"/model/{key}", detail)
    for key in () if latent else ("q_lora_rank", *LATENT):
        if getattr(model, key) is not None:
            rule = "it belongs to latent attention. Give kv_lora_rank, too, or remove it."
            yield Issue(f"/model/{key}", f"found {getattr(model, key)}; {rule}")
    if model.window is None:
        for key in ("full_attention_every", "index_heads", "chunked"):
            if getattr(model, key):
                rule = (
                    "it belongs to a window. Give window, the tokens that a query attends to, or remove it."
                )
                yield Issue(f"/model/{key}", f"found {str(getattr(model, key)).lower()}; {rule}")
    for key, other in (("index_heads", "index_dim"), ("index_dim", "index_heads")):
        if getattr(model, key) is None and getattr(model, other) is not None:
            yield Issue(f"/model/{key}", f"this key is absent, and {other} needs it.")
    if latent and model.output_gate:
        yield Issue("/model/output_gate", "found true; latent attention has no gate. Remove it.")
    if model.vision is not None and model.vision.hidden % model.vision.heads:
        rule = f"must divide its hidden ({model.vision.hidden})."
        yield Issue("/model/vision/heads", f"found {model.vision.heads}; {rule}")
    if model.vision is not None:
        yield from _vision_issues(model.vision)


def _vision_issues(vision: VisionConfig) -> Iterator[Issue]:
    places = vision.full_attention
    if places and vision.window is None:
        rule = "it belongs to a window. Give window, the patches of a piece, or remove it."
        yield Issue("/model/vision/full_attention", f"found {quoted(list(places))}; {rule}")
    elif any(place >= vision.layers for place in places):
        rule = f"must be below the encoder's layers ({vision.layers})."
        yield Issue("/model/vision/full_attention", f"found {max(places)}; {rule}")
    if vision.projector_gated and vision.projector == ():
        rule = "a projector of one matrix has no gate. Give the widths of projector, or remove it."
        yield Issue("/model/vision/projector_gated", f"found true; {rule}")


def _expert_issues(model: ModelConfig) -> Iterator[Issue]:
    chosen = model.experts_per_token
    if model.experts is None:
        for key in (
            "experts_per_token",
            "expert_ffn",
            "expert_hidden",
            "shared_expert_ffn",
            "expert_nodes",
            "capacity_factor",
        ):
            if getattr(model, key) is not None:
                rule = "it belongs to a mixture of experts. Give experts, their number, or remove it."
                yield Issue(f"/model/{key}", f"found {getattr(model, key)}; {rule}")
        return
    if chosen is None:
        detail = "this key is absent, and a model with experts needs it: how many a token is sent to."
        yield Issue("/model/experts_per_token", detail)
    elif chosen > model.experts:
        yield Issue("/model/experts_per_token", f"found {chosen}; must be at most experts ({model.experts}).")
    if model.dense_layers >= model.layers:
        rule = f"must be less than layers ({model.layers}), or no block has experts. Remove experts."
        yield Issue("/model/dense_layers", f"found {model.dense_layers}; {rule}")


def _pattern_issues(model: ModelConfig) -> Iterator[Issue]:
    if model.pattern is not None and len(model.kinds) != model.layers:
        rule = f"must have one for each of the layers ({model.layers})."
        yield Issue("/model/pattern", f"found {len(model.kinds)} layers; {rule}")
    letters = "".join((*model.kinds, *model.prediction_kinds))
    for letter, key in (("M", "state_space"), ("E", "experts"), ("W", "window"), ("I", "index_heads")):
        if letter in letters and getattr(model, key) is None:
            yield Issue(f"/model/{key}", f"this key is absent, and layers {letter} of the pattern need it.")
    if model.state_space is not None and "M" not in letters:
        rule = "pattern says which layers it is. Give pattern, or remove it."
        yield Issue("/model/state_space", f"found costs without a layer M; {rule}")


def _count_issues(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Issue]:
    """The layers, with the ends of the model, must not be more than a problem may have."""
    halves = 2 if parallel.granularity == "half" else 1
    predictions = model.prediction_layers * (3 if halves == 2 else 1)
    vision = 0 if model.vision is None else 2 + halves * model.vision.layers
    most = (MAX_LAYERS - 2 - predictions - vision) // halves
    if most < 1:  # no number of layers is small enough
        key, found = "prediction_layers", model.prediction_layers
        if model.vision is not None and vision > predictions:
            key, found = "vision/layers", model.vision.layers
        rule = f"together, with embedding and head, they must be at most {MAX_LAYERS}"
        yield Issue(
            "/model/layers", f"found {model.layers}, and {found} as {key}; {rule}. Use fewer of them."
        )
    elif model.layers > most:
        remedy = " Use granularity block." if halves == 2 else ""
        yield Issue("/model/layers", f"found {model.layers}; must be at most {most}.{remedy}")


def _tensor_issues(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Issue]:
    degree = parallel.tensor_parallel
    divided = {"heads": model.heads}
    if model.kv_lora_rank is None:
        divided["kv_heads"] = model.n_kv_heads
    if model.has_dense_mlp:
        divided["ffn"] = model.ffn_width
    if model.shared_expert_ffn is not None:
        divided["shared_expert_ffn"] = model.shared_expert_ffn
    divided["vocabulary"] = model.vocabulary
    if parallel.sequence_parallel:
        divided["sequence"] = model.sequence
    if model.vision is not None:
        divided["the heads of vision"] = model.vision.heads
    for name, size in divided.items():
        if size % degree:
            padded = f" Pad it to {-(-size // degree) * degree}." if name == "vocabulary" else ""
            rule = f"found {degree}; must divide {name} ({size}).{padded}"
            yield Issue("/parallel/tensor_parallel", rule)
    if model.experts is not None and degree > 1 and not parallel.sequence_parallel:
        detail = (
            f"found false; with experts and tensor_parallel {degree}, each device sends its own tokens to "
            f"experts, which needs sequence parallelism."
        )
        yield Issue("/parallel/sequence_parallel", detail)


def _context_issues(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Issue]:
    degree = parallel.context_parallel
    if degree == 1:
        return
    pieces = 2 * degree * (parallel.tensor_parallel if parallel.sequence_parallel else 1)
    if model.sequence % pieces:
        rule = (
            f"each device has two pieces of a sequence, so {pieces} must divide sequence ({model.sequence})."
        )
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")
    if model.attention == "plain":
        rule = "plain attention has no context parallelism. Use flash."
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")


def _expert_parallel_issues(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Issue]:
    degree, inside = parallel.expert_parallel, parallel.expert_parallel_in_node
    if degree % inside:
        rule = f"must divide expert_parallel ({degree})."
        yield Issue("/parallel/expert_parallel_in_node", f"found {inside}; {rule}")
    if degree == 1:
        return
    if model.experts is None:
        yield Issue("/parallel/expert_parallel", f"found {degree}; the model has no experts. Remove it.")
        return
    if model.experts % degree:
        yield Issue("/parallel/expert_parallel", f"found {degree}; must divide experts ({model.experts}).")
    devices = parallel.tensor_parallel * parallel.context_parallel * parallel.data_parallel
    if devices % degree:
        rule = f"must divide the devices of a rank, tensor x context x data parallel ({devices})."
        yield Issue("/parallel/expert_parallel", f"found {degree}; {rule}")


def _device_issues(model: ModelConfig, parallel: ParallelConfig, device: DeviceConfig) -> Iterator[Issue]:
    if parallel.tensor_parallel > 1 and device.tensor_parallel_bandwidth is None:
        yield Issue(
            "/device/tensor_parallel_bandwidth",
            f"this key is absent, and tensor_parallel {parallel.tensor_parallel} needs it. Give the GB/s "
            f"that a device sends within its group; with tensor_parallel_overlap 1 they cost nothing.",
        )
    if parallel.expert_parallel_in_node > 1 and device.tensor_parallel_bandwidth is None:
        detail = (
            "this key is absent, and expert_parallel_in_node needs it. Give the GB/s that a device sends "
            "inside its node."
        )
        yield Issue("/device/tensor_parallel_bandwidth", detail)
    for group in ("context", "expert"):
        degree, key = getattr(parallel, f"{group}_parallel"), f"{group}_parallel_bandwidth"
        if degree > 1 and getattr(device, key) is None and device.link_bandwidth is None:
            detail = (
                f"this key is absent, and {group}_parallel {degree} needs it, or link_bandwidth. Give the "
                f"GB/s that a device sends within its group; with {group}_parallel_overlap 1 they cost "
                f"nothing."
            )
            yield Issue(f"/device/{key}", detail)
    narrow = model.narrow_dtype
    if narrow is None and model.product_dtype not in (None, model.dtype):
        rule = f"must be fp8, fp4 or the type of activations, dtype ({model.dtype})."
        yield Issue("/model/product_dtype", f"found {quoted(model.product_dtype)}; {rule}")
    if narrow is not None and getattr(device, f"{narrow}_tflops") is None:
        detail = f"this key is absent, and product_dtype {narrow} needs it. Give its TFLOP/s."
        yield Issue(f"/device/{narrow}_tflops", detail)
    precision = parallel.precision
    chosen = PRECISIONS[precision] if isinstance(precision, str) else precision
    if chosen is not None and chosen.gathered and narrow != "fp8":
        detail = "parameters gathered in float8 need linear layers in float8"
        yield Issue("/parallel/precision", f"{detail}. Set product_dtype fp8, or choose another precision.")
    if "op" in parallel.recompute_modules and (
        len(set(parallel.recompute_modules)) > 1
        or parallel.granularity != "block"
        or model.attention != "flash"
    ):
        detail = (
            "torchtitan's selective recomputation has no modules, and needs whole blocks with flash attention"
        )
        yield Issue("/parallel/recompute_modules", f"found op; {detail}. Name op alone, or leave it out.")
    is_core = set(parallel.recompute_modules) <= {"core_attn"}
    if parallel.recompute == "selective" and is_core and model.attention == "flash":
        yield Issue(
            "/parallel/recompute",
            "found 'selective'; it recomputes the scores that plain attention keeps, and flash keeps none. "
            "Use full or none, or give other recompute_modules.",
        )
