"""A split model of transformers computes the losses and gradients of the unsplit one, for every family.

All tests that import transformers are in this file, because the import takes seconds.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import transformers
import zbv_worker as zbv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.gradients import gradients
from support.split_check import HOOKS, ON_PARAMETERS, check, strided
from support.stages import run_step
from support.thread_pipeline import on_ranks, plan_of, returned
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D
from zbv_models.estimate.families import TEXT_KINDS
from zbv_worker.adapters import safetensors_folder
from zbv_worker.adapters.causal_language_model import pipeline_model
from zbv_worker.adapters.split_modules import split_modules
from zbv_worker.adapters.transformers import TransformersLayers, from_transformers
from zbv_worker.adapters.transformers_source import SUPPORTED
from zbv_worker.errors import InvalidRun
from zbv_worker.measure.estimate.without_memory import built
from zbv_worker.model import Layered, PipelineModel, Tied, Weighted
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.spec import ModelSpec
from zbv_worker.stage.layers import call
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.stage import Stage
from zbv_worker.stage.weight_grads import WeightGrads

CPU = torch.device("cpu")
VOCABULARY, BATCH, LENGTH = 48, 2, 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,  # far from uniform attention
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
WINDOW = {"sliding_window": 3}
MIXED = {**WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]},
}
"""What the configurations of the families have in addition to the sizes."""


def config_of(family: str = "llama", **changes: Any) -> Any:
    config = transformers.CONFIG_MAPPING[family]
    return config(**{**SIZES, **OWN.get(family, {}), **changes})


def model_of(family: str = "llama", **changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config_of(family, **changes))


def read_by_transformers(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def all_layers(layers: TransformersLayers) -> nn.Sequential:
    return layers.build_layers(layers.layer_names(), CPU)


def data(padding: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens, labels and keywords; the second sequence ends with padding."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    if not padding:
        return tokens, tokens, {}
    mask = torch.ones_like(tokens)
    mask[1, -padding:] = 0
    return tokens, tokens.masked_fill(mask == 0, -100), {"attention_mask": mask}


def parameter_names(layers: TransformersLayers, model: nn.Module) -> dict[str, str]:
    """The names in the pipeline of a model's parameters."""
    return {name: layers.layer_parameter(name) for name in model.state_dict()}


def stages_of(layers: TransformersLayers, sizes: Sequence[int], **options: Any) -> list[Stage]:
    """Stages of so many layers each, with tied parameters shared."""
    names, stages = list(layers.layer_names()), []
    modules = []
    for size in sizes:
        modules.append(layers.build_layers(names[:size], CPU).train())
        names = names[size:]
    known = {name: (module, name) for module in modules for name, _ in module.named_parameters()}
    for first, second in layers.tied_parameters():
        (source, _), (target, _) = known[first], known[second]
        owner, _, leaf = second.rpartition(".")
        setattr(target.get_submodule(owner), leaf, source.get_parameter(first))
    for index, module in enumerate(modules):
        loss = layers.loss if index == len(modules) - 1 else None
        stages.append(Stage(index, len(modules), module, 1, loss, layers=list(module), **options))
    return stages


def trained(stages: Sequence[Stage], microbatch: tuple[Any, Any, Any], *, split: bool = True) -> Tensor:
    """Run a microbatch forward and backward; returns the loss summed over tokens."""
    (loss,) = run_step(stages, [microbatch], split=split)
    return cast(Tensor, loss)


def require_gradients(pipe: Any, layers: TransformersLayers, model: nn.Module) -> None:
    found, names = gradients(pipe), parameter_names(layers, model)
    for name, expected in gradients(model).items():
        torch.testing.assert_close(found[names[name]], expected, rtol=1e-5, atol=1e-5)


def whole_of(stages: Sequence[Stage]) -> Any:
    """All parameters of some stages, by their names in the pipeline."""
    named = [(whole_name(name), p) for stage in stages for name, p in stage.module.named_parameters()]
    return SimpleNamespace(named_parameters=lambda: named)


def unsplit(config: Any, layers: TransformersLayers, stages: Sequence[Stage]) -> Any:
    """The whole model of transformers with the parameters of the stages."""
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    own = {whole_name(name): x for stage in stages for name, x in stage.module.state_dict().items()}
    model.load_state_dict({name: own[at] for name, at in parameter_names(layers, model).items()})
    return model


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "i and w") for family in SUPPORTED),
        *((family, way) for family in ("gpt2", "mixtral") for way in ("b", "recomputed")),
    ],
)
def test_a_split_model_has_the_loss_and_gradients_of_the_whole(family: str, way: str) -> None:
    config = config_of(family)
    layers = from_transformers(config, seed=3)
    stages = stages_of(layers, [2, 2, 1], is_recomputed=way == "recomputed")
    model = unsplit(config, layers, stages)
    tokens, labels, keywords = data(padding=3)
    total = trained(stages, (tokens, labels, keywords), split=way != "b")
    weight = stages[-1].take_weight()
    assert weight == (LENGTH - 1) + (LENGTH - 1 - 3)
    reference = model(input_ids=tokens, labels=labels, **keywords)
    (reference.loss * weight).backward()
    torch.testing.assert_close(total / float(weight), reference.loss.detach(), rtol=1e-5, atol=1e-5)
    require_gradients(whole_of(stages), layers, model)


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "phi3"])
def test_without_a_mask_and_with_given_positions(family: str) -> None:
    config = config_of(family)
    layers = from_transformers(config)
    stages = stages_of(layers, [3, 2])
    model = unsplit(config, layers, stages)
    tokens, labels, _ = data()
    positions = (torch.arange(LENGTH) + 5).expand(BATCH, -1)
    for keywords in ({}, {"position_ids": positions}, {}):
        total = trained(stages, (tokens, labels, keywords))
        reference = model(input_ids=tokens, labels=labels, **keywords).loss
        torch.testing.assert_close(total / float(stages[-1].take_weight()), reference.detach())


@pytest.mark.parametrize("family", SUPPORTED)
def test_layers_built_alone_are_those_of_the_whole_model(family: str) -> None:
    layers = from_transformers(config_of(family, tie_word_embeddings=True), seed=5)
    names = layers.layer_names()
    assert names == ["embedding", "block.0", "block.1", "block.2", "head"]
    whole, apart = all_layers(layers).state_dict(), dict[str, Tensor]()
    for name in reversed(names):
        apart |= layers.build_layers([name], CPU).state_dict()
    require_same(apart, whole)
    ((embedding, head),) = layers.tied_parameters()
    assert torch.equal(whole[embedding], whole[head])
    other = all_layers(from_transformers(config_of(family, tie_word_embeddings=True), seed=6))
    assert not torch.equal(whole[embedding], other.state_dict()[embedding])


def require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(sorted(found.items())), dict(sorted(expected.items())), rtol=0, atol=0)


@pytest.mark.parametrize("family", SUPPORTED)
def test_weights_go_to_transformers_and_back(family: str, tmp_path: Path) -> None:
    """Two ranks write a folder that transformers loads; a rank reads its layers from there."""
    layers = from_transformers(config_of(family), seed=1)
    names = list(layers.layer_names())
    parts = [[names[0], names[-1]], names[1:-1]]  # a V
    built = [layers.build_layers(part, CPU).state_dict() for part in parts]
    for file, tensors in enumerate(built):
        layers.save_pretrained(tmp_path, tensors, layers_of_files=parts, file=file)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    model = read_by_transformers(tmp_path)
    at = parameter_names(layers, model)
    written = {whole_name(name): tensor for part in built for name, tensor in part.items()}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, written[at[name]], rtol=0, atol=0, msg=name)
    again = from_transformers(tmp_path, seed=2)
    for part, tensors in zip(parts, built, strict=True):
        require_same(again.build_layers(part, CPU).state_dict(), tensors)


FOLDERS: dict[str, Callable[[dict[str, Tensor], str, str], None]] = {
    "as saved": lambda tensors, embedding, head: None,
    "equal": lambda tensors, embedding, head: tensors.update({head: tensors[embedding].clone()}),
    "different": lambda tensors, embedding, head: tensors.update({head: tensors[embedding] + 1}),
    "different beyond bfloat16": lambda tensors, embedding, head: tensors.update(
        {embedding: (x := tensors[embedding].bfloat16().float()), head: x * (1 + 2**-14)}
    ),
    "head alone": lambda tensors, embedding, head: tensors.update({head: tensors.pop(embedding)}),
}
"""What a folder has of a tied embedding and head."""
ENDS = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
}


@pytest.mark.parametrize(
    ("content", "family", "dtype"),
    [
        *((content, "llama", torch.float32) for content in FOLDERS),
        ("different", "gpt2", torch.float32),
        ("head alone", "gpt_neox", torch.float32),
        ("different beyond bfloat16", "llama", torch.bfloat16),
    ],
)
def test_folders_are_tied_alike(content: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_of(family, tie_word_embeddings=True).save_pretrained(tmp_path)
    config_of(family, tie_word_embeddings=True, dtype=dtype).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    FOLDERS[content](tensors, *ENDS[family])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = read_by_transformers(tmp_path)
    require_equal(from_transformers(tmp_path), model)
    saved_again(from_transformers(tmp_path), model, tmp_path / "again")


def test_a_folder_that_is_not_tied_needs_both_tensors(tmp_path: Path) -> None:
    """``from_pretrained`` would make a random head."""
    model_of(tie_word_embeddings=True).save_pretrained(tmp_path)
    config_of(tie_word_embeddings=False).save_pretrained(tmp_path)
    layers = from_transformers(tmp_path)
    assert layers.tied_parameters() == []
    with pytest.raises(InvalidRun, match=r"found no tensor lm_head\.weight"):
        layers.build_layers(["head"], CPU)


def retied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def replaced(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def copied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def shares_blocks(model: Any) -> None:
    model.model.layers[2] = model.model.layers[0]
    model.model.norm.weight = model.model.layers[1].input_layernorm.weight


@pytest.mark.parametrize(
    ("change", "is_tied"),
    [(retied, False), (replaced, True), (copied, True), (copied, False), (shares_blocks, True)],
)
def test_a_model_is_tied_as_its_tensors(change: Callable[[Any], None], is_tied: bool, tmp_path: Path) -> None:
    """By hand, whatever its configuration says; and in what from_pretrained reads from the saved folder."""
    model = model_of(tie_word_embeddings=is_tied)
    change(model)
    require_equal(from_transformers(model), model)
    saved_again(from_transformers(model), model, tmp_path)


def require_equal(layers: TransformersLayers, model: Any) -> None:
    """Require the ties and values of a model."""
    at = parameter_names(layers, model)
    values = {whole_name(name): value for name, value in all_layers(layers).state_dict().items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[at[name]]), name
    sets: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sets.setdefault(id(parameter), []).append(at[name])
    wanted = {(some[0], other) for some in sets.values() for other in some[1:]}
    assert {(whole_name(first), whole_name(other)) for first, other in layers.tied_parameters()} == wanted


def saved_again(layers: TransformersLayers, model: Any, folder: Path) -> None:
    """Require that transformers reads the model again, its head tied or not, from what the layers save."""
    layers.save_pretrained(folder, all_layers(layers).state_dict())
    again = read_by_transformers(folder)
    require_same(again.state_dict(), model.state_dict())
    assert has_tied_ends(model) == has_tied_ends(again)


def layers_of_copy(source: Any) -> TransformersLayers:
    return from_transformers(copy.deepcopy(source))


def has_tied_ends(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


SEVERAL = [(2, "v"), (4, "single")]


@pytest.mark.parametrize(
    ("ranks", "placement", "change"),
    [(1, "v", replaced), *((*on, change) for on in SEVERAL for change in (retied, shares_blocks))],
)
def test_ties_by_hand_train_as_in_the_unsplit_model(
    ranks: int, placement: str, change: Callable[[Any], None], tmp_path: Path
) -> None:
    """Also after some steps; from the model, and from its folder, which cannot say that blocks are shared.

    The mask has as many rows as a sequence has tokens; it is divided like the tokens.
    """
    torch.manual_seed(0)
    model = model_of(tie_word_embeddings=change is replaced)
    change(model)
    reference, expected = copy.deepcopy(model).train(), []
    mask = torch.ones(4, 4, dtype=torch.long).tril(2)
    batches = [torch.randint(VOCABULARY, (4, 4)) for _ in range(3)]
    labels = [tokens.masked_fill(mask == 0, -100) for tokens in batches]
    made = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for tokens, wanted in zip(batches, labels, strict=True):
        loss = reference(input_ids=tokens, labels=wanted, attention_mask=mask, use_cache=False).loss
        expected.append(loss.detach())
        loss.backward()
        made.step()
        made.zero_grad()

    def program(pipe: zbv.Pipeline) -> Any:
        made = torch.optim.AdamW(pipe.named_parameters(), lr=1e-2)
        losses = []
        for tokens, wanted in zip(batches, labels, strict=True):
            losses.append(pipe.step(tokens, wanted, attention_mask=mask))
            made.step()
            made.zero_grad()
        return losses, pipe.full_state_dict()

    layers = from_transformers(model)
    names = parameter_names(layers, model)
    layers.save_pretrained(tmp_path, {names[name]: value for name, value in model.state_dict().items()})
    for source in (model, tmp_path) if change is not shares_blocks else (model,):
        found = returned(on_ranks(plan_of(ranks, placement), partial(layers_of_copy, source), None, program))
        losses = next(losses for losses, _ in found if losses[0] is not None)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        state = found[0][1]
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[names[name]], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_rank_reads_only_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of().save_pretrained(tmp_path)
    read = Mock(wraps=safetensors_folder._read)
    monkeypatch.setattr(safetensors_folder, "_read", read)
    from_transformers(str(tmp_path)).build_layers(["block.1"], CPU)
    assert read.call_count == 9
    assert all(key.startswith("model.layers.1.") for (_, key), _ in read.call_args_list)


def test_a_model_gives_its_own_modules() -> None:
    model = model_of()
    built = from_transformers(model).build_layers(["embedding", "block.0"], CPU)
    assert built.get_submodule("embedding.embed_tokens") is model.model.embed_tokens
    assert built.get_submodule("block/0.layer") is model.model.layers[0]


@pytest.mark.parametrize("option", [None, "eager", "sdpa"])
@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_masks_are_made_for_the_attention_of_a_given_model(before: str, option: str | None) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("mistral"), attn_implementation=before)
    layers = from_transformers(model, attention=option)
    assert model.config._attn_implementation == (option or before)
    later = "sdpa" if model.config._attn_implementation == "eager" else "eager"
    for attention in (None, later):  # changed by the user afterwards
        if attention is not None:
            model.set_attn_implementation(attention)
        tokens, _, keywords = data(padding=2)
        for more in ({}, keywords):
            hidden: Any = tokens
            for layer in layers.build_layers(layers.layer_names(), CPU):
                hidden = call(layer, hidden, more)
            torch.testing.assert_close(hidden, model(input_ids=tokens, **more).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 3}, "seed=3 with a model"),
        ({"dtype": torch.bfloat16}, r"dtype=torch.bfloat16 with a model of torch.float32.*model.to"),
        ({"attention": "none such"}, "rejects attention='none such'"),
    ],
)
def test_arguments_that_a_given_model_contradicts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRun, match=message):
        from_transformers(model_of(), **changes)


class Doubling(transformers.LlamaForCausalLM):  # type: ignore[misc]  # untyped
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits *= 2
        return output


def patch_forward(model: Any) -> None:
    model.model.forward = partial(model.model.forward, use_cache=False)


LLAMA = transformers.LlamaForCausalLM
CHANGES_OF_THE_WHOLE: list[tuple[Any, Callable[[Any], object], str]] = [
    (Doubling, lambda model: None, "a Doubling with another forward"),
    (LLAMA, patch_forward, "a LlamaModel with another forward"),
    (LLAMA, lambda model: model.register_forward_hook(print), "hooks of the LlamaForCausalLM itself"),
    (LLAMA, lambda model: model.model.register_forward_pre_hook(print), "hooks of the LlamaModel itself"),
    (LLAMA, lambda model: model.model.layers.pop(0), r"found \d blocks, and num_hidden_layers="),
]


@pytest.mark.parametrize(("kind", "change", "message"), CHANGES_OF_THE_WHOLE)
def test_calls_of_the_whole_are_refused(kind: Any, change: Callable[[Any], object], message: str) -> None:
    model = kind(config_of())
    change(model)
    with pytest.raises(InvalidRun, match=message):
        from_transformers(model)


def test_a_models_own_loss_function_is_refused_unless_there_is_another_loss() -> None:
    model = model_of()
    model.loss_function = print
    layers = from_transformers(model)
    with pytest.raises(InvalidRun, match="own loss_function"):
        layers.loss(torch.zeros(1, 2, VOCABULARY), torch.zeros(1, 2, dtype=torch.long))


def test_a_given_model_keeps_its_modes_and_what_measuring_would_change() -> None:
    model = model_of("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    expected = model(input_ids=tokens, labels=tokens).loss.detach()
    with pytest.warns(UserWarning, match=r"resid_pdrop has no effect.*model\.train"):
        layers = from_transformers(model)
    with zbv.Pipeline(None, layers, microbatches=1, example=(tokens, tokens)) as pipe:
        assert not any(module.training for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
        require_same(model.state_dict(), before)
        torch.testing.assert_close(pipe.step(tokens, tokens), expected)
        model.train()
        assert abs(pipe.step(tokens, tokens) - expected) > 0.01
        torch.testing.assert_close(pipe.evaluate(tokens, tokens), expected)
        assert all(module.training for module in model.modules())
    all_layers(from_transformers(model))
    assert all(module.training for module in model.modules())


def test_the_dtype_is_the_configurations_or_the_given_one() -> None:
    config = config_of(dtype=torch.bfloat16)
    dtypes = [
        next(from_transformers(config, dtype=dtype).build_layers(["block.0"], CPU).parameters()).dtype
        for dtype in (None, torch.float32)
    ]
    assert dtypes == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("is_given", [False, True])
def test_layers_on_the_meta_device_have_no_values(is_given: bool) -> None:
    """Those of a given model stay where they are."""
    source = model_of("mixtral") if is_given else config_of("mixtral")
    built = from_transformers(source).build_layers(["embedding", "block.0", "head"], torch.device("meta"))
    assert all(parameter.is_meta for parameter in built.parameters())
    assert not is_given or not any(parameter.is_meta for parameter in source.parameters())


def test_dropout_is_that_of_the_model() -> None:
    """Computing the arguments of blocks draws no random numbers."""
    config = config_of("gpt2", embd_pdrop=0.5, resid_pdrop=0.5)
    layers = from_transformers(config)
    stages = stages_of(layers, [5])
    model = unsplit(config, layers, stages)
    tokens, labels, _ = data()
    torch.manual_seed(0)
    total = trained(stages, (tokens, labels, {}), split=False)
    torch.manual_seed(0)
    expected = model(input_ids=tokens, labels=labels).loss
    torch.testing.assert_close(total / float(stages[0].take_weight()), expected.detach())


def test_a_pipeline_computes_the_balancing_loss_of_a_batch_with_padding() -> None:
    """One process with two stages and two microbatches of one sequence each."""
    config = config_of("mixtral")
    layers = from_transformers(config)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    tokens, labels, keywords = data(padding=3)
    with zbv.Pipeline(plan_of(1, "v", microbatches=2), layers) as pipe:
        own, names = pipe.state_dict(), parameter_names(layers, model)
        model.load_state_dict({name: own[at] for name, at in names.items()})
        loss = pipe.step(tokens, labels, attention_mask=keywords["attention_mask"])
        weights = [LENGTH - 1, LENGTH - 1 - 3]
        expected = torch.zeros(())
        for at, weight in enumerate(weights):
            row = slice(at, at + 1)
            mask = keywords["attention_mask"][row]
            found = model(input_ids=tokens[row], labels=labels[row], attention_mask=mask).loss
            expected = expected + weight * found / sum(weights)
        torch.autograd.backward(expected)
        assert loss is not None
        torch.testing.assert_close(torch.as_tensor(float(loss)), expected.detach(), rtol=1e-5, atol=1e-5)
        require_gradients(pipe, layers, model)


SHARES = {"llama": 0.99, "gpt2": 0.98, "mixtral": 0.98, "qwen2_moe": 0.97}
"""The least shares of a block; LayerNorms, RMSNorms and routers are left to I."""


@pytest.mark.parametrize("family", SHARES)
def test_w_computes_most_weight_gradients(family: str) -> None:
    layers = from_transformers(config_of(family))
    stages = stages_of(layers, [2, 2, 1])
    trained(stages, data())
    share: Any = stages[1].split_share
    assert share.share > SHARES[family], str(share)
    assert share == stages[1].expected_share


class TestSources:
    def test_a_json_file(self, tmp_path: Path) -> None:
        config_of().save_pretrained(tmp_path)
        found = from_transformers(tmp_path / "config.json").build_layers(["head"], CPU)
        expected = from_transformers(config_of()).build_layers(["head"], CPU)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))

    def test_a_model_without_experts_has_no_balancing_loss(self) -> None:
        layers = from_transformers(config_of(output_router_logits=True))
        assert all_layers(layers)(data()[0]).shape == (BATCH, LENGTH, VOCABULARY)

    def test_a_class(self) -> None:
        layers = from_transformers(transformers.LlamaForCausalLM)
        assert len(layers.layer_names()) == transformers.LlamaConfig().num_hidden_layers + 2

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            (transformers.T5Config(), r"model_type 't5'; zbv splits the families gemma, .*qwen3_moe"),
            (3, "must be a configuration, a model"),
            (None, "must be a configuration, a model"),
            (transformers.LlamaModel, "found a LlamaModel, .* Use LlamaForCausalLM"),
            (transformers.LlamaForSequenceClassification, "found a LlamaForSeq.*, .* Use LlamaForCausalLM"),
            (Path("/absent"), "Nothing is downloaded"),
        ],
    )
    def test_other_sources_are_refused(self, source: object, message: str) -> None:
        with pytest.raises(InvalidRun, match=message):
            from_transformers(source)

    @pytest.mark.parametrize(("text", "said"), [("{", "cannot be read as JSON"), ("[]", "model_type None")])
    def test_a_file_that_is_no_configuration_is_refused(self, text: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(InvalidRun, match=said):
            from_transformers(tmp_path)

    def test_a_folder_without_tensors_is_refused(self, tmp_path: Path) -> None:
        config_of().save_pretrained(tmp_path)
        with pytest.raises(InvalidRun, match=r"found neither model\.safetensors nor"):
            from_transformers(tmp_path).build_layers(["head"], CPU)

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
    def test_quantized_tensors_are_refused(self, dtype: torch.dtype, tmp_path: Path) -> None:
        """Without their scales, they are other values than the model's."""
        from safetensors.torch import load_file, save_file

        layers = from_transformers(config_of())
        built = layers.build_layers(list(layers.layer_names()), CPU).state_dict()
        layers.save_pretrained(tmp_path, built)
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        scale = {f"{name}_scale_inv": torch.ones(1, 1)}
        save_file({**tensors, name: tensors[name].to(dtype), **scale}, path, {"format": "pt"})
        layers = from_transformers(tmp_path)
        with pytest.raises(InvalidRun, match=rf"{name} in {dtype}, so it is quantized"):
            layers.build_layers(list(layers.layer_names()), CPU)

    def test_missing_and_misshapen_tensors_are_refused(self, tmp_path: Path) -> None:
        layers = from_transformers(config_of())
        names = list(layers.layer_names())
        built = layers.build_layers(names, CPU).state_dict()
        layers.save_pretrained(tmp_path, built)
        config_of(hidden_size=64).save_pretrained(tmp_path)
        with pytest.raises(InvalidRun, match=r"with shape \((48, )?32,?\).*requires \((48, )?64,?\)"):
            from_transformers(tmp_path).build_layers(["head"], CPU)
        layers.save_pretrained(tmp_path, built, layers_of_files=[names[:-1]])
        with pytest.raises(InvalidRun, match=r"found no tensor (model\.norm|lm_head)\.weight"):
            from_transformers(tmp_path).build_layers(["head"], CPU)
        with pytest.raises(InvalidRun, match="found no tensor embedding"):
            layers.save_pretrained(tmp_path, {})

    def test_an_incomplete_copy_is_refused(self, tmp_path: Path) -> None:
        layers = from_transformers(config_of())
        names = list(layers.layer_names())
        built = layers.build_layers(names[:1], CPU).state_dict()
        layers.save_pretrained(tmp_path, built, layers_of_files=[names[:1], names[1:]])
        with pytest.raises(InvalidRun, match=r"the index names model-00002-of-00002\.safetensors"):
            from_transformers(tmp_path).build_layers(["embedding"], CPU)

    def test_transformers_may_be_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(InvalidRun, match=r"pip install 'zbv\[transformers\]'"):
            from_transformers("anything")

    def test_old_versions_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
        with pytest.raises(InvalidRun, match=r"found transformers 4\.57\.1; zbv needs 5 or later"):
            from_transformers("anything")


class TestPipelineModel:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        config_of(vocab_size=256).save_pretrained(tmp_path)
        return tmp_path

    def test_it_has_what_the_worker_needs(self, folder: Path) -> None:
        arguments = {"sequence_length": 8, "sequences": 3}
        model = ModelSpec(f"transformers:{folder}/config.json", arguments, seed=0).build()
        for protocol in (PipelineModel, Layered, Tied, Weighted):
            assert isinstance(model, protocol)
        (tokens, labels), (others, _) = model.microbatch(0, 0), model.microbatch(0, 1)
        assert tokens.shape == (3, 8)
        assert torch.equal(tokens, labels)
        assert not torch.equal(tokens, others)
        whole = model.build_stage(0, 1, CPU)
        loss = model.loss(whole(tokens), labels)
        assert loss.isfinite()
        halves = [model.build_stage(stage, 2, CPU) for stage in (0, 1)]
        assert torch.equal(loss, model.loss(halves[1](halves[0](tokens)), labels))
        assert len(model.optimizer(whole.parameters()).param_groups) == 1

    def test_a_text_without_a_tokenizer_is_bytes(self, folder: Path) -> None:
        text = folder / "text"
        text.write_text("ab" * 20)
        source = str(folder / "config.json")
        tokens, _ = pipeline_model(source, sequence_length=8, data=str(text)).microbatch(0, 0)
        assert set(tokens.flatten().tolist()) == {ord("a"), ord("b")}

    def test_a_tokenizer_of_the_folder_is_used(self, folder: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({"red": 0, "blue": 1, "?": 2}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        text = folder / "text"
        text.write_text("red blue " * 20)
        tokens, _ = pipeline_model(str(folder), sequence_length=4, data=str(text)).microbatch(0, 0)
        assert set(tokens.flatten().tolist()) == {0, 1}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sequence_length": 0}, "sequence_length=0; must be a positive integer"),
            ({"dtype": "tensor"}, "found dtype='tensor'; must be a dtype"),
            ({"data": "absent"}, "cannot read absent"),
            ({"data": "short"}, "found 3 tokens; a sequence needs 130"),
            ({"data": "wide"}, "found the token 255, but the model's vocab_size is 200"),
        ],
    )
    def test_wrong_arguments_are_refused(
        self, arguments: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        Path("short").write_bytes(b"abc")
        Path("wide").write_bytes(b"\xff" * 200)
        with pytest.raises(InvalidRun, match=message):
            pipeline_model(config_of(vocab_size=200), **arguments)


SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_conv1d_computes_what_autograd_computes(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.complex64)), "dtype")
    rows = draw(st.lists(st.integers(0, 3), max_size=3), "rows")
    inner, outer = draw(st.integers(1, 4), "width"), draw(st.integers(1, 4), "nf")
    layer = Conv1D(outer, inner)
    for name, parameter in list(layer.named_parameters()):
        number = torch.randn(parameter.shape, dtype=dtype)
        setattr(layer, name, nn.Parameter(number, requires_grad=draw(st.booleans(), f"trained {name}")))
    strides = draw(st.sampled_from(("contiguous", "transposed", "expanded", "gaps")), "strides")
    needs_gradient = draw(st.booleans(), "gradient of the input")
    hooks = draw(st.sampled_from(sorted(set(HOOKS) - {"full backward"})), "hooks")
    check(
        layer,
        [lambda: (strided((*rows, inner), strides, dtype).requires_grad_(needs_gradient),)] * 2,
        hooks=hooks,
        uses=draw(st.integers(1, 3), "uses"),
        autocast=draw(st.sampled_from((None, torch.bfloat16)), "autocast")
        if dtype is torch.float32
        else None,
        prepare=split_modules,
        is_split=None if hooks in ON_PARAMETERS else not dtype.is_complex,
    )


def experts_of(count: int) -> nn.Module:
    config = transformers.MixtralConfig(num_local_experts=count, hidden_size=8, intermediate_size=8)
    made: nn.Module = MixtralExperts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_experts_compute_what_autograd_computes(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)), "dtype")
    tokens, experts = draw(st.integers(1, 5), "tokens"), draw(st.integers(1, 4), "experts")
    layer = experts_of(experts).to(dtype)
    for parameter in layer.parameters():
        parameter.requires_grad_(draw(st.booleans(), "trained"))
    needs_gradient = draw(st.booleans(), "gradient of the input")
    hooks = draw(st.sampled_from(sorted(set(HOOKS) - {"full backward"})), "hooks")
    chosen = draw(st.integers(1, experts), "experts per token")

    def make() -> tuple[Tensor, ...]:
        index = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
        hidden = torch.randn(tokens, 8, dtype=dtype).requires_grad_(needs_gradient)
        return hidden, index, torch.rand(tokens, chosen, dtype=dtype).requires_grad_(needs_gradient)

    check(
        layer,
        [make] * 2,
        hooks=hooks,
        uses=draw(st.integers(1, 2), "uses"),
        prepare=split_modules,
        is_split=None if hooks in ON_PARAMETERS else True,
    )


def test_experts_without_tokens_have_no_gradients() -> None:
    layer = experts_of(2)
    module = nn.ModuleList([layer])
    split_modules(module)
    queue = WeightGrads()
    x, index = torch.randn(0, 8, requires_grad=True), torch.zeros(0, 2, dtype=torch.long)
    with defer_weight_gradients(module).into(queue):
        output = layer(x, index, torch.rand(0, 2))
    assert output.shape == x.shape
    output.sum().backward()
    queue.run()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


def test_every_type_that_the_worker_trains_can_be_estimated() -> None:
    assert set(SUPPORTED) <= set(TEXT_KINDS)


def test_an_estimate_builds_no_layer_with_memory() -> None:
    """With memory, a layer of a large model takes seconds and gigabytes."""
    model = pipeline_model(config_of("qwen3"), sequence_length=8)
    devices: list[str] = []

    def build(name: str, device: torch.device) -> nn.Module:
        devices.append(device.type)
        return model.build_layers([name], device)

    for name in model.layer_names():
        built(name, partial(build, name), FakeTensorMode(allow_non_fake_inputs=True))
    assert set(devices) == {"meta"}
