"""The rules between the numbers of a model, and between them and its parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import Issue

from zbv_models.estimate.frozen import Frozen, places
from zbv_models.estimate.model import TARGET_MODULES, Transformer, Vision
from zbv_models.estimate.model_layers import blocks, matrices_of
from zbv_models.estimate.shapes import Degrees

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_EXPERTS = (
    *("experts_per_token", "expert_ffn", "expert_hidden", "shared_expert_ffn", "expert_nodes"),
    "capacity_factor",
)


def model_issues(model: Transformer) -> Iterator[Issue]:
    """One issue per broken rule between the numbers of a model."""
    yield from _variant_issues(model)
    letters = model.likes("".join((*model.kinds, *model.prediction_kinds)))
    latent = model.kv_lora_rank is not None
    needed = [(key, "latent attention (kv_lora_rank) needs it") for key in LATENT if latent]
    pairs = (("index_heads", "index_dim"), ("index_dim", "index_heads"))
    needed += [(key, f"{other} needs it") for key, other in pairs if getattr(model, other) is not None]
    if model.experts is not None:
        needed.append(("experts_per_token", "a model with experts needs it: how many a token is sent to"))
    for letter, key in (("M", "state_space"), ("E", "experts"), ("W", "window"), ("I", "index_heads")):
        own = [
            variant for variant in model.variants if variant.like == letter and getattr(variant, key, None)
        ]
        if letter in letters and not own:
            needed.append((key, f"layers {letter} of the pattern need it"))
    for key, why in needed:
        if getattr(model, key) is None:
            yield Issue(f"/model/{key}", f"this key is absent, and {why}.")
    for absent, keys, what in (
        (not latent, ("q_lora_rank", *LATENT), "latent attention. Give kv_lora_rank, too"),
        (model.window is None, ("full_attention_every", "index_heads", "chunked"),
         "a window. Give window, the tokens that a query attends to"),
        (model.experts is None, OF_EXPERTS, "a mixture of experts. Give experts, their number"),
    ):  # fmt: skip
        for key in keys:
            if absent and (value := getattr(model, key)):
                found = f"found {str(value).lower()}; it belongs to {what}, or remove it."
                yield Issue(f"/model/{key}", found)
    yield from _head_issues(model, "/model")
    if model.experts is not None and (model.experts_per_token or 0) > model.experts:
        rule = f"must be at most experts ({model.experts})."
        yield Issue("/model/experts_per_token", f"found {model.experts_per_token}; {rule}")
    if model.experts is not None and model.dense_layers >= model.layers:
        rule = f"must be less than layers ({model.layers}), or no block has experts. Remove experts."
        yield Issue("/model/dense_layers", f"found {model.dense_layers}; {rule}")
    if model.pattern is not None and len(model.kinds) != model.layers:
        rule = f"must have one for each of the layers ({model.layers})."
        yield Issue("/model/pattern", f"found {len(model.kinds)} layers; {rule}")
    if model.state_space is not None and "M" not in letters:
        rule = "pattern says which layers it is. Give pattern, or remove it."
        yield Issue("/model/state_space", f"found costs without a layer M; {rule}")
    if model.vision is not None:
        yield from _vision_issues(model.vision)


def _head_issues(model: Transformer, where: str) -> Iterator[Issue]:
    if model.head_dim is None and model.kv_lora_rank is None and model.hidden % model.heads:
        rule = f"must divide hidden ({model.hidden}). Or give head_dim, their width."
        yield Issue(f"{where}/heads", f"found {model.heads}; {rule}")
    if model.heads % model.n_kv_heads:
        rule = f"must divide heads ({model.heads}): each serves as many of them."
        yield Issue(f"{where}/kv_heads", f"found {model.kv_heads}; {rule}")


def _variant_issues(model: Transformer) -> Iterator[Issue]:
    """Every letter is that of one variant, and its sizes fit together."""
    known = [variant.letter for variant in model.variants]
    used = "".join((model.pattern or "", model.prediction_pattern or ""))
    others = sorted({letter for letter in used if letter.islower()} - set(known))
    if others:
        rule = "a lower-case letter must be that of one of the variants. Add it to them."
        yield Issue("/model/pattern", f"found {others[0]}; {rule}")
    for place, letter in enumerate(known):
        where = f"/model/variants/{place}"
        if known.index(letter) < place:
            yield Issue(f"{where}/letter", f"found {letter} again; must have another letter.")
        else:
            varied, _ = model.varied(letter)
            yield from _head_issues(varied, where)
            yield from _compressed_issues(varied, where)
    if not model.variants:
        yield from _compressed_issues(model, "/model")


def _compressed_issues(model: Transformer, where: str) -> Iterator[Issue]:
    sizes = model.compressed
    if sizes is None:
        return
    if model.heads % sizes.output_groups:
        rule = f"must divide heads ({model.heads})."
        yield Issue(f"{where}/compressed/output_groups", f"found {sizes.output_groups}; {rule}")
    for key, absent in (("window", model.window is None), ("index_heads", model.index_heads is None)):
        if absent and (key == "window" or sizes.chosen is not None):
            yield Issue(f"/model/{key}", "this key is absent, and compressed attention needs it.")
    if sizes.chosen is not None and sizes.ratio is None:
        rule = "it chooses compressed tokens. Give ratio, the tokens that become one, or remove it."
        yield Issue(f"{where}/compressed/chosen", f"found {sizes.chosen}; {rule}")


def degree_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    """One issue per degree of parallelism that does not divide what it shares."""
    yield from _tensor_issues(model, degrees)
    yield from _context_issues(model, degrees)
    yield from _expert_parallel_issues(model, degrees)


def frozen_issues(model: Transformer) -> Iterator[Issue]:
    """One issue per frozen part that a valid model lacks, or if nothing trains."""
    frozen, last = Frozen.of(model), model.layers - 1
    lacking = {
        "vision": model.vision is None, "projector": model.vision is None,
        "predictions": not model.prediction_layers,
    }  # fmt: skip
    for word in model.frozen:
        of_layers = places(word, model.layers)
        if lacking.get(word):
            yield Issue("/model/frozen", f"found {word}; the model has none. Leave it out.")
        elif word[0].isdigit() and (not of_layers or of_layers[-1] > last):
            rule = f"the model has layers 0 to {last}; give one, or the first and the last as in 0-{last}."
            yield Issue("/model/frozen", f"found {word}; {rule}")
    if model.tied_embeddings and len(frozen.parts & {"embedding", "head"}) == 1:
        (word,) = frozen.parts & {"embedding", "head"}
        rule = "embedding and head share a table (tied_embeddings). Freeze both or neither."
        yield Issue("/model/frozen", f"found {word} alone; {rule}")
    if model.frozen_dtype is not None and not frozen.blocks:
        rule = "it is the type of frozen blocks, and none is frozen. Give frozen or lora_rank, or remove it."
        yield Issue("/model/frozen_dtype", f"found {model.frozen_dtype}; {rule}")
    if frozen.lora is None:
        for key in ("target_modules", "layers_to_transform"):
            if words := getattr(model, key):
                rule = "it belongs to LoRA. Give lora_rank, too, or remove it."
                yield Issue(f"/model/{key}", f"found {', '.join(words)}; {rule}")
        if len(frozen.blocks) == model.layers and not set(_parts_of(model)) - frozen.parts:
            rule = "then nothing trains. Leave a part out, or give lora_rank."
            yield Issue("/model/frozen", f"found {', '.join(model.frozen)}; {rule}")
        return
    if not frozen.blocks:
        rule = "adapters are for frozen layers, and none is frozen. Freeze layers, too, or leave out frozen."
        yield Issue("/model/lora_rank", f"found {model.lora_rank}; {rule}")
        return
    for word in model.layers_to_transform:
        of_layers = places(word, model.layers)
        if not of_layers or of_layers[-1] > last or not set(of_layers) <= frozen.blocks:
            rule = f"must be frozen layers, of which there are {len(frozen.blocks)} from 0 to {last}."
            yield Issue("/model/layers_to_transform", f"found {word}; {rule}")
            return
    adapted = [
        matrix for kind in blocks(model) if kind.lora is not None for matrix in matrices_of(model, kind)
    ]
    names = [name for name in TARGET_MODULES if any(name in matrix.names for matrix in adapted)]
    for module in frozen.lora.modules:
        if module not in names:
            rule = f"no frozen layer has such a matrix. Name some of {', '.join(names)}."
            if not names:
                rule = "no frozen layer has a matrix that LoRA adapts here. Leave out lora_rank."
            yield Issue("/model/target_modules", f"found {module}; {rule}")


def _parts_of(model: Transformer) -> Iterator[str]:
    """The parts of a model besides its blocks."""
    yield from ("embedding", "head")
    if model.prediction_layers:
        yield "predictions"
    if model.vision is not None:
        yield from ("vision", "projector")


def fits(model: Transformer, degrees: Degrees) -> bool:
    """Whether the degrees divide what they share."""
    return next(degree_issues(model, degrees), None) is None


def _vision_issues(vision: Vision) -> Iterator[Issue]:
    if vision.hidden % vision.heads:
        yield Issue("/model/vision/heads", f"found {vision.heads}; must divide its hidden ({vision.hidden}).")
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


@lru_cache(maxsize=64)
def _divided(model: Transformer) -> dict[str, int]:
    """The sizes of blocks that tensor parallelism divides, by their names."""
    found: dict[str, int] = {}
    for letter in sorted(set("".join((*model.kinds, *model.prediction_kinds)))):
        varied, like = model.varied(letter)
        of = "" if letter == like else f" of variant {letter}"
        if like == "M" and model.origin is not None:
            found["heads"] = model.heads
        elif like == "-":
            found[f"ffn{of}"] = varied.ffn_width
        elif like in "*WI":
            found[f"heads{of}"] = varied.heads
            if varied.compressed is not None:
                found[f"output_groups{of}"] = varied.compressed.output_groups
            elif varied.kv_lora_rank is None:
                found[f"kv_heads{of}"] = varied.n_kv_heads
    return found


def _tensor_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree = degrees.tensor
    divided = dict(_divided(model))
    if model.shared_expert_ffn is not None:
        divided["shared_expert_ffn"] = model.shared_expert_ffn
    divided["vocabulary"] = model.vocabulary
    if degrees.sequence_parallel:
        divided["sequence"] = model.sequence
    if model.vision is not None:
        divided["the heads of vision"] = model.vision.heads
        divided["the ffn of vision"] = model.vision.ffn_width
    for name, size in divided.items():
        if size % degree:
            padded = f" Pad it to {-(-size // degree) * degree}." if name == "vocabulary" else ""
            rule = f"found {degree}; must divide {name} ({size}).{padded}"
            yield Issue("/parallel/tensor_parallel", rule)
    if model.experts is not None and degree > 1 and not degrees.sequence_parallel:
        detail = (
            f"found false; with experts and tensor_parallel {degree}, each device sends its own tokens to "
            f"experts, which needs sequence parallelism."
        )
        yield Issue("/parallel/sequence_parallel", detail)


def _context_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree = degrees.context
    if degree == 1:
        return
    pieces = 2 * degree * (degrees.tensor if degrees.sequence_parallel else 1)
    if model.sequence % pieces:
        rule = (
            f"each device has two pieces of a sequence, so {pieces} must divide sequence ({model.sequence})."
        )
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")
    if model.attention == "plain":
        rule = "plain attention has no context parallelism. Use flash."
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")


def _expert_parallel_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree, inside = degrees.expert, degrees.expert_in_node
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
    devices = degrees.tensor * degrees.context * degrees.data
    if devices % degree:
        rule = f"must divide the devices of a rank, tensor x context x data parallel ({devices})."
        yield Issue("/parallel/expert_parallel", f"found {degree}; {rule}")
