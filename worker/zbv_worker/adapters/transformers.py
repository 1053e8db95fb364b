"""Causal language models of the transformers library as layers of a pipeline.

:func:`from_transformers` returns the layers ``embedding``, ``block.0`` and so on, and ``head``. A rank builds
only its own layers, from modules of transformers' own classes, and reads only their tensors. Nothing is
downloaded.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from zbv_worker.adapters.decoder_layers import (
    Anatomy,
    BlockArguments,
    DecoderBlock,
    DecoderEmbedding,
    DecoderHead,
)
from zbv_worker.adapters.routing import RoutedBlock, RoutedEmbedding, RoutedHead, Routing
from zbv_worker.adapters.safetensors_folder import equal_ties, read_tensors, write_index, write_tensors
from zbv_worker.adapters.split_modules import split_modules
from zbv_worker.adapters.transformers_source import (
    dtype_of,
    like,
    on_meta,
    require_language_model,
    require_transformers,
    resolved,
    supported,
)
from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.model.layer_list import shared_names, stacked, whole_name, without_memory
from zbv_worker.stage.whole_batch import HOOKS

IGNORED = -100
"""The label of tokens that the loss ignores, as in transformers."""

_SEEDING = threading.Lock()
"""Initial parameters come from torch's global generator, which ranks in threads of one process share."""


def from_transformers(
    source: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
) -> TransformersLayers:
    """The layers of a causal language model of transformers.

    Parameters
    ----------
    source
        A configuration, or the path of its JSON file, or a model class (with its default configuration):
        initial parameters are random. A folder with ``config.json`` and safetensors: each rank reads the
        tensors of its layers. A model: its own modules become the layers, and keep their modes, configuration
        and attention. ``from_pretrained`` returns a model in evaluation mode; call its ``train()`` to train
        with dropout.
    seed
        Decides random initial parameters, together with the layer. Not for a model, which has parameters.
    dtype
        The dtype of parameters; the configuration's if None, else float32. Not for a model: call its ``to``.
    attention
        ``"sdpa"``, ``"eager"`` or another name of transformers; None for its choice. In a given model it is
        set for all layers (``set_attn_implementation``), and stays set.

    Raises
    ------
    InvalidRun
        If transformers is missing, the source cannot be read, its family or the attention is not supported,
        or an argument does not fit a given model.
    """
    require_transformers()
    from transformers import PreTrainedModel

    if isinstance(source, PreTrainedModel):
        require_language_model(type(source), supported(source.config))
        _require_known_forward(source)
        _keep(source, seed, dtype, attention)
        return TransformersLayers(like(source), seed, own=source)
    model_class, config, folder = resolved(source)
    model = on_meta(model_class, config, dtype or dtype_of(config), attention)
    _require_known_forward(model)
    return TransformersLayers(model, seed, folder=folder)


def _require_known_forward(model: Any) -> None:
    """Refuse what only the forward of the whole model would use: the pipeline calls the modules inside."""
    for module in (model, model.base_model):
        name, kind = type(module).__name__, type(module).forward.__module__
        if "forward" in vars(module) or not kind.startswith("transformers."):
            raise InvalidRun(
                f"from_transformers: found a {name} with another forward than that of transformers, which a "
                f"pipeline does not call. Pass layers that compute it: a list of modules, and loss=."
            )
        if any(vars(module)[hooks] for hooks in HOOKS):
            raise InvalidRun(
                f"from_transformers: found hooks of the {name} itself, which a pipeline does not call. "
                f"Remove them, or register them with the modules inside."
            )
    blocks = len(getattr(model.base_model, Anatomy.of(model).blocks))
    configured = model.config.num_hidden_layers
    if blocks != configured:
        raise InvalidRun(
            f"from_transformers: found {blocks} blocks, and num_hidden_layers={configured} in the "
            f"configuration. Set model.config.num_hidden_layers."
        )


def _keep(model: Any, seed: int, dtype: torch.dtype | None, attention: str | None) -> None:
    """Check the arguments for a given model, and set its attention."""
    if seed:
        raise InvalidRun(
            f"from_transformers: found seed={seed} with a model, which has its parameters already. Omit it."
        )
    if dtype not in (None, model.dtype):
        raise InvalidRun(
            f"from_transformers: found dtype={dtype} with a model of {model.dtype}. Omit it, or call "
            f"model.to({dtype}) before."
        )
    if attention is not None:
        try:
            model.set_attn_implementation(attention)
        except Exception as error:  # transformers raises classes of several libraries
            raise InvalidRun(
                f"from_transformers: transformers rejects attention={attention!r}: {describe_error(error)}. "
                f"Pass 'sdpa' or 'eager'."
            ) from error
        if model.config._attn_implementation != attention:
            raise InvalidRun(
                f"from_transformers: found attention={attention!r}; the model keeps "
                f"{model.config._attn_implementation!r}. Omit the argument."
            )
    draws = [
        name
        for name, value in model.config.to_dict().items()
        if "drop" in name and isinstance(value, float) and value > 0
    ]
    if draws and not any(module.training for module in model.modules()):
        warnings.warn(
            f"the model is in evaluation mode, as from_pretrained returns it, so {draws[0]} has no effect. "
            f"Call model.train() to train with it.",
            stacklevel=3,
        )


class TransformersLayers:
    """The layers of a causal language model; see :class:`zbv_worker.model.Layered`.

    Parameters
    ----------
    model
        The whole model, on the meta device.
    folder
        The folder with its tensors; None for random parameters.
    own
        The model that has the layers already.
    """

    def __init__(self, model: Any, seed: int, *, folder: Path | None = None, own: Any = None):
        self.config = model.config
        self._model = model
        self._seed = seed
        self._folder = folder
        self._anatomy = Anatomy.of(model)
        self._routing = Routing.of(model if own is None else own)
        self._own = own

    def layer_names(self) -> Sequence[str]:
        """The embedding, the blocks, the head."""
        count = len(getattr(self._model.base_model, self._anatomy.blocks))
        return ["embedding", *(f"block.{block}" for block in range(count)), "head"]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Layers by name."""
        arguments = BlockArguments(self._anatomy)
        return stacked({name: self._layer(name, device, arguments) for name in names})

    def loss(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`loss_sum`, which a pipeline takes as its loss."""
        return self.loss_sum(output, target)

    def loss_sum(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """The cross entropy of the next token, summed, and the number of predicted tokens.

        The mean of a single microbatch is the loss of the unsplit model. The balancing loss of experts counts
        once per predicted token.

        Parameters
        ----------
        output
            Logits (b, t, vocabulary); with a balancing loss, a dictionary with ``logits`` and ``balance``.
        target
            Labels (b, t), not shifted: usually the input, with -100 for tokens that are not predicted.
        """
        if hasattr(self._own, "_loss_function"):
            raise InvalidRun(
                "found a model with its own loss_function, which a pipeline does not call. Pass loss=, a "
                "function of logits and labels, to Pipeline."
            )
        labels = nnf.pad(target[..., 1:], (0, 1), value=IGNORED).flatten()
        logits, balance = (output["logits"], output["balance"]) if self._routing else (output, None)
        total = nnf.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
        count = (labels != IGNORED).sum()
        return (total if balance is None else total + count * balance), count

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """The embedding's weight and the head's, if they are shared, and what else a given model shares.

        Tensors decide, not the configuration: those of the model, or of the folder as ``from_pretrained``
        reads it.
        """
        return [
            (self.layer_parameter(source), self.layer_parameter(target))
            for target, source in self._shared.items()
        ]

    @cached_property
    def _shared(self) -> dict[str, str]:
        """The first name of every parameter with several names; names of the whole model."""
        if self._own is not None:
            paths = [path for layer in self.layer_names() for path in self._paths(layer).values()]
            pairs = shared_names({path: self._own.get_submodule(path) for path in paths})
            return {target: source for source, target in pairs}
        configured: dict[str, str] = self._model.all_tied_weights_keys
        if self._folder is None:
            return configured
        return equal_ties(self._folder, self._model, configured)

    def save_pretrained(
        self,
        folder: str | Path,
        tensors: Mapping[str, Tensor],
        *,
        layers_of_files: Sequence[Sequence[str]] | None = None,
        file: int = 0,
    ) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads.

        Every rank calls it and writes one file, with the tensors of its layers; the rank that writes file 0
        also writes ``config.json`` and the index. Ranks need not wait for each other.

        Parameters
        ----------
        tensors
            Parameters and buffers of the file's layers by name, as in ``state_dict`` of the pipeline or of
            :meth:`build_layers`; others are ignored.
        layers_of_files
            The layers of each file; None for one file with all layers.
        file
            The file to write, from 0.

        Raises
        ------
        InvalidRun
            If a tensor of the file's layers is missing.
        """
        files = (
            [list(self.layer_names())]
            if layers_of_files is None
            else [list(each) for each in layers_of_files]
        )
        # Parameters that from_pretrained ties are stored once; others under each of their names.
        tied = self._shared.items() & (type(self._model)._tied_weights_keys or {}).items()
        omitted = {target for target, _ in tied}
        names = [
            [name for layer in layers for name in self._tensor_names(layer) if name not in omitted]
            for layers in files
        ]
        known = {whole_name(name): tensor for name, tensor in tensors.items()}
        given = {name: known.get(self.layer_parameter(name)) for name in names[file]}
        missing = [self.layer_parameter(name) for name, tensor in given.items() if tensor is None]
        if missing:
            raise InvalidRun(
                f"save_pretrained: found no tensor {missing[0]} for file {file}; pass all tensors of the "
                f"layers {', '.join(files[file])}."
            )
        path = Path(folder)
        write_tensors(path, self._model, {n: t for n, t in given.items() if t is not None}, file, len(files))
        if file == 0:
            write_index(path, self._model, names, is_tied=bool(tied))

    def _layer(self, name: str, device: torch.device, arguments: BlockArguments) -> nn.Module:
        modules, routing = self._modules(name, device), self._routing
        if name == "embedding":
            if routing is not None:
                return RoutedEmbedding(self._anatomy, modules, routing)
            return DecoderEmbedding(self._anatomy, modules)
        if name == "head":
            if routing is not None:
                return RoutedHead(self._anatomy, modules, routing)
            return DecoderHead(self._anatomy, modules)
        (layer,) = modules.values()
        split_modules(layer)
        if routing is not None:
            return RoutedBlock(layer, self._block(name), arguments, routing)
        return DecoderBlock(layer, self._block(name), arguments)

    def _paths(self, name: str) -> dict[str, str]:
        """The modules of a layer: their names in the layer, and in the whole model."""
        anatomy = self._anatomy
        if name == "embedding":
            return {child: anatomy.prefix(child) for child in anatomy.before}
        if name == "head":
            return {child: anatomy.prefix(child) for child in anatomy.after} | {
                end: end for end in anatomy.ends
            }
        return {"layer": anatomy.prefix(f"{anatomy.blocks}.{self._block(name)}")}

    def _block(self, name: str) -> int:
        if name not in self.layer_names():
            raise InvalidRun(f"found the layer {name!r}; the model has {', '.join(self.layer_names())}.")
        return int(name.removeprefix("block."))

    def _modules(self, name: str, device: torch.device) -> dict[str, nn.Module]:
        """The modules of a layer with their parameters, by their names in the layer."""
        paths = self._paths(name)
        if self._own is not None:
            modules = {child: self._own.get_submodule(path) for child, path in paths.items()}
            if device.type == "meta":
                return {child: without_memory(module) for child, module in modules.items()}
            return {child: module.to(device) for child, module in modules.items()}
        made = {child: copy.deepcopy(self._model.get_submodule(path)) for child, path in paths.items()}
        if device.type == "meta":
            return made
        values = self._stored(name)
        for child, module in made.items():
            module.to_empty(device="cpu")
            with torch.no_grad():
                for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    value = values.get(f"{paths[child]}.{key}")
                    if value is not None:
                        tensor.copy_(value)
                        tensor._is_hf_initialized = True  # transformers' initialisation leaves it as it is
        self._initialise(name, list(made.values()))
        return {child: module.to(device) for child, module in made.items()}

    def _stored(self, name: str) -> dict[str, Tensor]:
        """The tensors of a layer that do not come from its own random numbers, by name in the whole model."""
        own = self._tensor_names(name)
        if self._folder is not None:
            return read_tensors(self._folder, self._model, own, self._shared)
        tied = {target: self._shared[target] for target in own if target in self._shared}
        if not tied:
            return {}
        # The head of a rank without the embedding begins with the same values.
        embedding = nn.ModuleDict(self._modules("embedding", torch.device("cpu"))).state_dict()
        paths = self._paths("embedding")
        by_path = {f"{paths[key.split('.')[0]]}.{key.partition('.')[2]}": embedding[key] for key in embedding}
        return {target: by_path[source] for target, source in tied.items()}

    def _initialise(self, name: str, modules: Sequence[nn.Module]) -> None:
        """Random parameters that depend on the seed and the layer only; also buffers that are not stored."""
        at = self.layer_names().index(name)
        with _SEEDING, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self._seed * 1_000_003 + at)
            for module in modules:
                module.apply(self._model._init_weights)

    def _tensor_names(self, layer: str) -> list[str]:
        """The parameters and stored buffers of a layer, by name in the whole model."""
        return [
            f"{path}.{key}"
            for path in self._paths(layer).values()
            for key in self._model.get_submodule(path).state_dict()
        ]

    def layer_parameter(self, name: str) -> str:
        """A parameter's name in the pipeline, by its name in the model of transformers."""
        for layer in self.layer_names():
            for child, path in self._paths(layer).items():
                if name.startswith(f"{path}."):
                    return f"{layer}.{child}.{name.removeprefix(f'{path}.')}"
        raise InvalidRun(f"found the parameter {name}, which belongs to no layer.")
