"""Models of types that zbv does not know, from transformers' own modules on the meta device.

Every different block runs forward and backward once. Parameters are counted exactly. Operations are those
of torch's counter, and a microbatch keeps what autograd keeps; flash attention and RMSNorm count as single
kernels, because training uses such. MLPs and routed experts have the formulas of
:mod:`zbv_models.estimate.feed_forward`, with the sizes of their matrices, and Mamba layers those of
:mod:`zbv_models.estimate.recurrent`, so that parallelism divides them as it does in types that zbv knows. The
rest of a block becomes the given costs (:class:`~zbv_models.estimate.state_space.GivenCosts`) of its first
half. Their memory traffic is not counted: every kept tensor is written once and read once.

Not for types that have a file in :mod:`zbv_models.estimate.families`. Importing this module imports torch and
transformers.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.numeric import MAX_LAYERS

from zbv_models.estimate.feed_forward import Experts, Mlp
from zbv_models.estimate.module_counts import Count, Counting, flash, norm, storage, tensors
from zbv_models.estimate.part import Part
from zbv_models.estimate.recurrent import Mamba, SelectiveScan
from zbv_models.estimate.sections import Section
from zbv_models.estimate.shapes import Shapes, Stream
from zbv_models.estimate.transformers_kinds import SPARE

FLASH = "zbv"
"""Our attention, by the name that it has in transformers."""
FEED_FORWARD = re.compile("mlp|feed_?forward|ffn|^ff$|expert|moe", re.IGNORECASE)
"""Names of MLPs, or of their classes."""
PLACES = ("idx", "index", "layer_id", "layer_number")
"""Ends of the names of attributes that say which block it is, not what it computes."""
NOT_OF_SIZES = ("quantization_config", "compression_config", "auto_map", "dtype", "torch_dtype")
MOST_WORDS = 300
"""Characters of another library's message that a refusal repeats."""
REMEDY = "Write its sizes as model.json instead."
OTHERS = "Layers of any kind can be measured (zbv-worker profile), and the problem of a profile planned."


@dataclass(frozen=True)
class _Second:
    """The second half of a block, as far as formulas compute it."""

    mlp: Mlp | None = None
    experts: Experts | None = None

    @property
    def common(self) -> Section:
        """Keys of the section ``model`` that its variant cannot change."""
        if self.experts is None:
            return {} if self.mlp is None else {"gated": self.mlp.gated}
        shared = None if self.experts.shared is None else self.experts.shared.ffn
        latent, gated = self.experts.latent, self.experts.expert.gated
        return {"gated": gated, "expert_hidden": latent, "shared_expert_ffn": shared}

    @property
    def sizes(self) -> Section:
        """Keys of its variant."""
        if self.experts is None:
            return {} if self.mlp is None else {"like": "-", "ffn": self.mlp.ffn}
        count, chosen, ffn = self.experts.experts, self.experts.chosen, self.experts.expert.ffn
        return {"like": "E", "experts": count, "experts_per_token": chosen, "expert_ffn": ffn}

    def part(self, shapes: Shapes, *, routed: bool = True) -> Part | None:
        """Costs of the whole half, or without the routed tokens, which are not measured."""
        if self.experts is None:
            return None if self.mlp is None else self.mlp.part(shapes)
        return (self.experts if routed else replace(self.experts, chosen=0)).part(shapes)


@dataclass(frozen=True)
class _Measured:
    """A kind of block."""

    count: Count
    parameters: int
    second: _Second


def model_of(document: Mapping[str, Any], sequence: int) -> Section:
    """The section ``model`` of a ``config.json`` whose type transformers knows, for sequences of a length.

    Raises
    ------
    InvalidInput
        transformers rejects the file, or has no decoder of its type, or the decoder reads values of tensors.
    """
    if type(sequence) is not int or sequence < 1:
        raise _refused("/model/sequence", f"found {quoted(sequence)}; must be a whole number above 0.")
    refusals = []
    for attention in (FLASH, "eager"):  # without our kernel, attention's operators are counted as they are
        try:
            return _measured_model(_configuration(document), attention, sequence)
        except InvalidInput as error:
            refusals.append(error)
    raise refusals[-1]


def _measured_model(config: Any, attention: str, sequence: int) -> Section:
    model = _built(config, attention)
    counting = Counting(frozenset(map(storage, model.parameters())))
    ALL_ATTENTION_FUNCTIONS.register(FLASH, flash(counting))
    _use_kernels(model, counting)
    outside, blocks = _measured(model, _blocks(model), counting, sequence)
    return _section(model, outside, blocks, sequence)


def knows(name: object) -> bool:
    """Whether transformers knows a type."""
    return name in transformers.CONFIG_MAPPING


def _configuration(document: Mapping[str, Any]) -> Any:
    text = json.dumps({key: value for key, value in document.items() if key not in NOT_OF_SIZES})
    try:
        values = json.loads(text, object_hook=_number_or)
        config = transformers.CONFIG_MAPPING[document["model_type"]].from_dict(values)
    except Exception as error:  # transformers raises classes of several libraries
        raise _refused("", f"transformers rejects this file: {_words(error)} Correct it.") from error
    layers = config.get_text_config(decoder=True).to_dict().get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise _refused("/num_hidden_layers", f"found {layers}; must be at most {MAX_LAYERS}.")
    if config.is_encoder_decoder:
        found = f"found {quoted(document['model_type'])}, which has an encoder and a decoder"
        raise _refused("/model_type", f"{found}; zbv plans models with one sequence of layers.")
    return config


def _number_or(part: dict[str, Any]) -> Any:
    """The number of an object such as ``{"__float__": "Infinity"}``, which JSON has no numbers for."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part


def _built(config: Any, attention: str) -> Any:
    config.use_cache = False
    ALL_ATTENTION_FUNCTIONS.register(FLASH, lambda *_, **__: None)
    try:
        made = _class_of(type(config))
        if made is not None:
            with torch.device("meta"):
                model = made._from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
            model = model.to("meta").train()  # some classes put parameters on the CPU
    except Exception as error:
        raise _refused(
            "",
            f"transformers cannot build this model: {_words(error)} A key may be absent or wrong. "
            f"Compare the file with a published one of type {config.model_type}.",
        ) from error
    if made is None or not _reads_tokens(model):
        found = f"found {quoted(config.model_type)}; transformers has no language model of this type."
        raise _refused("/model_type", f"{found} {OTHERS}")
    return model


def _reads_tokens(model: Any) -> bool:
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except NotImplementedError:  # transformers' answer for models of images and of sound
        return False


def _class_of(configuration: Any) -> Any:
    """The language model of a configuration's class, with a head if there is one; None without any."""
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if configuration in mapping:
            return mapping[configuration]
    home = configuration.__module__.replace(".configuration_", ".modeling_")
    own = [each for name, each in vars(import_module(home)).items() if name.endswith("TextModel")]
    return next((each for each in own if each.config_class is configuration), None)


def _refused(pointer: str, detail: str) -> InvalidInput:
    return InvalidInput.at(pointer, detail)


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_WORDS else text[:MOST_WORDS].rpartition(" ")[0] + " …"
    return f"{type(error).__name__}: {text.rstrip('.')}."


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The list of modules with the most parameters, and of several such the outermost one."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)]
    if not lists:
        raise _refused("", f"{type(model).__name__} of transformers has no list of blocks. {REMEDY}")
    return max(lists, key=_size)


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _use_kernels(model: nn.Module, counting: Counting) -> None:
    """Replace what training computes in one kernel, and what depends on values."""
    for module in model.modules():
        weight, name = getattr(module, "weight", None), type(module).__name__
        scan = _scan(module)
        if name.endswith("RMSNorm") and len(inspect.signature(module.forward).parameters) == 1:
            if weight is not None and weight.ndim == 1:
                module.forward = norm(module)
        elif scan is not None:
            module.forward = partial(_scanned, counting, scan)
        elif _experts(module) is not None:
            module.forward = partial(_routed, counting)


def _scan(module: nn.Module) -> Section | None:
    """The costs of a Mamba layer, by the names that all of transformers have."""
    found: dict[str, Any] = vars(module)
    names = ("intermediate_size", "ssm_state_size", "conv_kernel_size")
    last = module._modules.get("out_proj")
    if not isinstance(last, nn.Linear) or not set(names) <= set(found):
        return None
    hidden, (inner, state, kernel) = last.out_features, (found[name] for name in names)
    if {"num_heads", "n_groups", "chunk_size"} <= set(found):
        heads, groups, chunk = (found[name] for name in ("num_heads", "n_groups", "chunk_size"))
        return Mamba(hidden, heads, inner, state, groups, kernel, chunk).costs()
    rank = found.get("time_step_rank")
    return None if rank is None else SelectiveScan(hidden, inner, state, rank, kernel).costs()


def _scanned(counting: Counting, costs: Section, *args: Any, **kwargs: Any) -> Tensor:
    """A stand-in for a Mamba layer without its norm."""
    hidden, into = tensors((args, kwargs))[0], counting.into
    tokens = hidden[..., 0].numel()
    into.products += tokens * costs["flops"]
    into.others += tokens * costs["core_flops"]
    into.backward += tokens * 2 * (costs["flops"] + costs["core_flops"])
    key = -1 - len(into.kept)
    of_norm = 2 * hidden.element_size() * hidden.shape[-1]
    into.kept[key] = int(tokens * (costs["after_forward"] - of_norm))
    into.waiting[key] = int(tokens * costs["after_input"])
    return hidden * 1.0


def _routed(counting: Counting, *args: Any, **kwargs: Any) -> Tensor:
    """A stand-in for routed experts, whose work depends on the router's choice; formulas compute it."""
    hidden, *routing = tensors((args, kwargs))
    for each in routing:
        if each.is_floating_point():
            hidden = hidden * each.mean().to(hidden.dtype)
        else:
            counting.into.chosen = each.shape[-1]
    return hidden


def _experts(module: nn.Module) -> Experts | None:
    """Routed experts with stacked matrices; experts per token are not known yet."""
    stacked = [each for each in module.parameters(recurse=False) if each.ndim == 3]
    if len(stacked) < 2 or "expert" not in type(module).__name__.lower():
        return None
    *first, last = stacked
    into, count = sum(each[0].numel() for each in first), last.shape[0]
    inputs, rest = divmod(into, last[0].numel())
    if rest or inputs not in (1, 2):
        return None
    width = next((size for size in last.shape[1:] if size in first[0].shape[1:]), last.shape[-1])
    ffn = last[0].numel() // width
    return Experts(count, 1, Mlp(ffn, inputs == 2, fused_activation=False), latent=width)


def _mlp(name: str, module: nn.Module, hidden: int) -> Mlp | None:
    """An MLP of two or three matrices."""
    if not FEED_FORWARD.search(name.rpartition(".")[2]) and not FEED_FORWARD.search(type(module).__name__):
        return None
    sizes = [tuple(each.weight.shape) for each in module.children() if isinstance(each, nn.Linear)]
    if len(sizes) not in (2, 3) or sizes[-1][0] != hidden:
        return None
    ffn = sizes[-1][1]
    into, rest = divmod(sum(out for out, _ in sizes[:-1]), ffn)
    if rest or into not in (1, 2) or any(width != hidden for _, width in sizes[:-1]):
        return None
    return Mlp(ffn, into == 2, fused_activation=False)


def _second(block: nn.Module, hidden: int, chosen: int) -> _Second:
    """The largest MLP of a block and those equal to it, or routed experts with these as shared ones."""
    routed = next(filter(None, map(_experts, block.modules())), None)
    found = [mlp for name, each in block.named_modules() if (mlp := _mlp(name, each, hidden)) is not None]
    mlp = None
    if found:
        largest = max(found, key=lambda each: each.ffn * each.inputs)
        mlp = replace(largest, ffn=largest.ffn * found.count(largest))
    if routed is None:
        return _Second(mlp)
    latent = None if routed.latent == hidden else routed.latent
    is_alike = mlp is not None and mlp.gated == routed.expert.gated
    return _Second(None, replace(routed, chosen=chosen, latent=latent, shared=mlp if is_alike else None))


def _likeness(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same."""
    return tuple(
        (
            name,
            type(each),
            tuple((key, tuple(weight.shape)) for key, weight in each.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(each).items()
                if isinstance(value, bool | int | float | str | None) and not key.endswith(PLACES)
            ),
        )
        for name, each in module.named_modules()
    )


def _measured(
    model: Any, blocks: nn.ModuleList, counting: Counting, sequence: int
) -> tuple[Count, list[_Measured]]:
    """What is computed outside of the blocks, and every block in order; equal ones run once."""
    seen: set[int] = set()
    known: dict[Hashable, tuple[Count, Any]] = {}
    kinds: list[Hashable] = []
    parameters: list[int] = []
    for block in blocks:
        own = [each for each in block.parameters() if id(each) not in seen]
        seen |= set(map(id, own))
        parameters.append(sum(each.numel() for each in own))
        kinds.append(_likeness(block))
        block.forward = partial(_run_once, counting, known, kinds[-1], block, block.forward)
    has_mask = model.config._attn_implementation != FLASH
    try:
        with torch.device("meta"), torch.no_grad(), counting:
            tokens = torch.ones((1, sequence), dtype=torch.long)
            model(input_ids=tokens, **({"attention_mask": tokens} if has_mask else {}))
    except Exception as error:  # the model's own code may raise anything
        detail = f"{type(model).__name__} does not run on tensors without values: {_words(error)}"
        most = model.config.to_dict().get("max_position_embeddings")
        if isinstance(most, int) and most < sequence:
            found = f"found {sequence}; max_position_embeddings of the file is {most}."
            raise _refused("/model/sequence", f"{found} Give shorter sequences.") from error
        raise _refused("", f"{detail} {REMEDY}") from error
    idle = [place for place, kind in enumerate(kinds) if kind not in known]
    if idle:
        raise _refused("", f"block {idle[0]} of {type(model).__name__} does not run on text alone. {REMEDY}")
    hidden = model.get_input_embeddings().weight.shape[1]
    measured = [
        _Measured(known[kind][0], own, _second(block, hidden, known[kind][0].chosen))
        for kind, own, block in zip(kinds, parameters, blocks, strict=True)
    ]
    for place, (each, block) in enumerate(zip(measured, blocks, strict=True)):
        if each.parameters < _size(block):  # blocks before it have the same parameters
            measured[place] = _without_second(each, place)
    return counting.into, measured


def _run_once(
    counting: Counting,
    known: dict[Hashable, tuple[Count, Any]],
    kind: Hashable,
    block: nn.Module,
    forward: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block that differs from those before it; the others give what that gave, which has no values."""
    if kind not in known:
        weights = [each for each in block.parameters() if each.requires_grad]
        known[kind] = counting.run(forward, args, kwargs, weights)
    return known[kind][1]


def _section(model: Any, outside: Count, blocks: list[_Measured], sequence: int) -> Section:
    """The section ``model``: a variant for the rest of every different block, and one for its second half."""
    table = model.get_input_embeddings().weight
    vocabulary, hidden = table.shape
    head = model.get_output_embeddings()
    config = model.config.get_text_config(decoder=True).to_dict()
    is_tied = bool(config.get("tie_word_embeddings")) if head is None else head.weight is table
    shapes = Shapes(Stream(hidden), sequence)
    # What lies outside of the blocks, besides the formulas of the ends, is of the first block.
    ends = hidden + vocabulary * hidden * (1 if is_tied or head is None else 2)
    more = _size(model) - ends - sum(each.parameters for each in blocks)
    of_head = 0.0 if head is None else 2.0 * sequence * vocabulary * hidden
    products = max(0.0, outside.products - of_head)
    seconds = [block.second for block in blocks]
    seconds.sort(key=lambda second: second.experts is None)  # those with experts decide
    common = next((each.common for each in seconds if each.common), {})
    variants: dict[str, Section] = {}

    def letter(sizes: Section) -> str:
        """That of a variant."""
        key = str(sizes)
        if key not in variants and len(variants) == len(SPARE):
            raise _refused("", f"found more than {len(SPARE)} different blocks. {REMEDY}")
        variants.setdefault(key, {"letter": SPARE[len(variants) % len(SPARE)], **sizes})
        return str(variants[key]["letter"])

    pattern = ""
    for place, block in enumerate(blocks):
        if not block.second.common.items() <= common.items():
            block = _without_second(block, place)
        first = (more, products, outside.others) if place == 0 else (0, 0.0, 0.0)
        letters = letter({"like": "M", "state_space": _rest(block, shapes, *first)})
        sizes = block.second.sizes
        pattern += f"({letters}{letter(sizes)})" if sizes else letters
    heads = config.get("num_attention_heads", config.get("num_heads"))  # one number, or one for each block
    heads = heads if isinstance(heads, int) and 0 < heads < hidden else 1
    name = f"{type(model).__name__}, transformers {transformers.__version__}"
    if model.config._attn_implementation != FLASH:
        name += ", which keeps attention's matrices of scores"
    of_experts = {
        key: value for key, value in seconds[0].sizes.items() if seconds[0].experts and key != "like"
    }
    return {
        "hidden": hidden, "layers": len(blocks), "heads": heads, "head_dim": hidden // heads, **common,
        **of_experts, "fused_activation": False, "pattern": pattern,
        "variants": list(variants.values()), "vocabulary": vocabulary, "tied_embeddings": is_tied,
        "norm": "rmsnorm", "bias": False, "positions": "none", "dtype": "bfloat16", "sequence": sequence,
        "origin": {"model_type": model.config.model_type, "measured": name},
    }  # fmt: skip


def _without_second(block: _Measured, place: int) -> _Measured:
    """A block whose second half has no formula, because it is measured as the rest."""
    if block.second.experts is not None:
        raise _refused("", f"block {place} shares its experts, or has others than those before. {REMEDY}")
    return replace(block, second=_Second())


def _rest(block: _Measured, shapes: Shapes, parameters: int, products: float, others: float) -> Section:
    """What a block has besides its second half, and what lies outside of blocks, per token."""
    count, tokens = block.count, shapes.tokens
    known, whole = (block.second.part(shapes, routed=routed) for routed in (False, True))
    kept, waiting = sum(count.kept.values()), sum(count.waiting.values())
    own = block.parameters + parameters
    weights = count.products
    core, back = count.others, count.backward - 2 * count.products
    if known is not None and whole is not None:
        own -= whole.parameters.total
        weights -= sum(each.flops for each in known.products)
        kept -= known.after_forward
        waiting -= known.after_input
    return {
        "parameters": own,
        "flops": max(0.0, weights + products) / tokens,
        "core_flops": (core + others) / tokens,
        "core_flops_back": max(0.0, back + 2 * others) / tokens,
        "memory_traffic": 2 * max(0.0, kept) / tokens,
        "after_forward": max(0.0, kept) / tokens,
        "after_input": max(0.0, waiting) / tokens,
    }
