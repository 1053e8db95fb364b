"""A decoder of transformers, cut into embedding, blocks and head, by running the model's own code.

No layer repeats code of an architecture. Every layer runs the ``forward`` of the model's own classes, on a
copy of the model in which everything else is replaced:

- the *embedding* runs the decoder's forward without blocks and without the final norm;
- a *block* runs the decoder's forward with a probe in place of every block, to learn the arguments of the
  block (masks, rotary embeddings, positions), and then the block itself;
- the *head* runs the forward of the language model with only the final norm in place of the decoder.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from zbv_worker.errors import InvalidRun


@dataclass(frozen=True)
class Anatomy:
    """The parts of a causal language model."""

    model: Any
    """The whole model, on the meta device."""
    decoder: str
    blocks: str
    """The attribute names of the decoder in the model and of the list of blocks in the decoder, for
    instance ``model`` and ``layers``."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    """The names of the decoder's other modules with parameters or without any state, by when they run:
    before the first block or after the last one."""

    @classmethod
    def of(cls, model: Any) -> Anatomy:
        """Find the parts of a model on the meta device, by running its decoder without blocks.

        Raises
        ------
        InvalidRun
            If the model is not a decoder with one list of blocks between an embedding and a norm.
        """
        name, decoder = model.base_model_prefix, model.base_model
        lists = [key for key, child in decoder.named_children() if isinstance(child, nn.ModuleList)]
        if decoder is model or len(lists) != 1:
            raise InvalidRun(
                f"found a {type(model).__name__} with {len(lists)} lists of layers; zbv cuts a language "
                f"model that has a decoder with one list. Pass the layers as a list of modules instead."
            )
        order = _order_of_children(model, lists[0])
        at = order.index(lists[0])
        unused = [
            key
            for key, child in decoder.named_children()
            if key not in order and any(True for _ in child.parameters())
        ]
        direct = [key for key, _ in decoder.named_parameters(recurse=False)]
        direct += [key for key, _ in model.named_parameters(recurse=False)]
        if unused or direct:
            raise InvalidRun(
                f"found {', '.join(unused + direct)} in a {type(model).__name__}, outside of its embedding, "
                f"blocks and head; zbv cannot place them. Pass the layers as a list of modules instead."
            )
        return cls(model, name, lists[0], tuple(order[:at]), tuple(order[at + 1 :]))

    def prefix(self, child: str) -> str:
        """The name of a child of the decoder in the whole model."""
        return f"{self.decoder}.{child}"

    @property
    def ends(self) -> tuple[str, ...]:
        """The names of the model's modules next to the decoder: the language-model head."""
        return tuple(key for key, _ in self.model.named_children() if key != self.decoder)


def _order_of_children(model: Any, blocks: str) -> list[str]:
    """The children of a decoder that run, in order; those that have only buffers (rotary) are left out."""
    decoder, called = model.base_model, _Calls()
    probe = _Probe(getattr(decoder, blocks)[0], called)
    stand_ins: dict[str, nn.Module] = {blocks: nn.ModuleList([probe])}
    order: list[str] = []
    for key, child in decoder.named_children():
        has_only_buffers = not any(True for _ in child.parameters()) and any(True for _ in child.buffers())
        if key != blocks and not has_only_buffers:
            stand_ins[key] = _Nothing(model.config.hidden_size)
        if key in stand_ins:
            target = probe if key == blocks else stand_ins[key]
            target.register_forward_pre_hook(lambda *_, key=key: order.append(key))
    with torch.no_grad():
        _decoder_with(model, stand_ins)(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    if order.count(blocks) != 1 or len(set(order)) != len(order):
        raise InvalidRun(
            f"found a {type(decoder).__name__} that runs its modules in the order {', '.join(order)}; zbv "
            f"needs each once. Pass the layers as a list of modules instead."
        )
    return order


def _without(module: Any, replacements: Mapping[str, nn.Module]) -> Any:
    """A copy of a module that shares its children except the replaced ones."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {**module._modules, **replacements}
    return copied


class _Calls(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    """The positional and keyword arguments of calls."""


class _Probe(nn.Module):
    """Stands for a block: records its arguments and returns its input."""

    def __init__(self, block: nn.Module, calls: _Calls):
        super().__init__()
        self.__dict__["block"] = block  # not a child
        self.__dict__["calls"] = calls

    def __getattr__(self, name: str) -> Any:
        """Attributes of the block, for instance its type of attention, by which a decoder selects masks."""
        return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **keywords: Any) -> Tensor:
        """The input, unchanged."""
        self.calls.append((args, keywords))
        return hidden


class _Nothing(nn.Module):
    """Stands for a module with parameters in a decoder of which only the blocks' arguments are needed."""

    def __init__(self, width: int):
        super().__init__()
        self._width = width

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros for indices of an embedding, other input unchanged."""
        return x if x.is_floating_point() else torch.zeros(*x.shape, self._width, device=x.device)


class BlockArguments:
    """The arguments that a decoder passes to its blocks: masks, rotary embeddings, positions.

    Blocks of a stage share them. They depend on the microbatch only through its attention mask and positions;
    without either they are computed once.
    """

    def __init__(self, anatomy: Anatomy):
        model = anatomy.model
        self._calls = _Calls()
        probes = [_Probe(block, self._calls) for block in getattr(model.base_model, anatomy.blocks)]
        others = (*anatomy.before, *anatomy.after)
        replaced: dict[str, nn.Module] = {name: _Nothing(model.config.hidden_size) for name in others}
        self._decoder = _decoder_with(model, {**replaced, anatomy.blocks: nn.ModuleList(probes)})
        self._last: tuple[Any, ...] = ()
        self._found = _Calls()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def of(
        self, block: int, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a block, besides the hidden states (b, t, width)."""
        of_hidden = (type(hidden), hidden.shape, hidden.dtype, hidden.device)
        given = (attention_mask, position_ids)
        # By identity and version: to compare values would make the CPU wait for a GPU.
        key = (*of_hidden, *((x, x._version) for x in given if x is not None), *(x is None for x in given))
        if not _is_same(key, self._last):
            self._calls.clear()
            # Real tensors also for an estimate: decoders look at values, which fake tensors lack.
            is_fake = isinstance(hidden, FakeTensor) and attention_mask is None and position_ids is None
            with torch.no_grad(), _disable_current_modes() if is_fake else nullcontext():
                # Of the hidden states only the shape, dtype and device matter.
                dummy = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
                self._decoder(
                    inputs_embeds=dummy,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    use_cache=False,
                )
            self._last, self._found = key, _Calls(self._calls)
        return self._found[block]


def _is_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two keys are equal; tensors are compared by identity."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, tuple) and isinstance(y, tuple):
            if x[0] is not y[0] or x[1] != y[1]:
                return False
        elif x != y:
            return False
    return True


def _decoder_with(model: Any, replacements: Mapping[str, nn.Module]) -> Any:
    """The decoder with replaced children, in evaluation mode; the others (rotary embeddings) on the CPU.

    The rotary embeddings move their frequencies to the input's device by themselves.
    """
    kept = {k: child for k, child in model.base_model.named_children() if k not in replacements}
    made = {key: _materialised(model, child) for key, child in kept.items()}
    decoder = _without(model.base_model, {**made, **replacements})
    decoder.training = False  # only its own: the replacements may be the user's modules
    return decoder


def _materialised(model: Any, module: nn.Module) -> nn.Module:
    """A copy of a module of a model on the meta device, with initial parameters and buffers, on the CPU."""
    copied = copy.deepcopy(module).to_empty(device="cpu")
    # Initial values are computed: a default device without memory, as in an estimate, has none.
    with torch.device("cpu"), torch.no_grad():
        copied.apply(model._init_weights)
    # So that a forward for the arguments of blocks draws no random numbers.
    return copied.eval()


class DecoderEmbedding(nn.Module):
    """Tokens (b, t) to the hidden states (b, t, width) that enter the first block.

    Its modules have their names in the decoder.
    """

    per_row = ("position_ids",)

    def __init__(self, anatomy: Anatomy, modules: Mapping[str, nn.Module]):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        replaced = {name: nn.Identity() for name in anatomy.after}
        decoder = _decoder_with(anatomy.model, {**modules, **replaced, anatomy.blocks: nn.ModuleList()})
        self.__dict__["_decoder"] = decoder  # not a child

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The decoder's forward without blocks and norm."""
        decoder: Any = self._decoder
        found = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        hidden: Tensor = found.last_hidden_state
        return hidden


class DecoderBlock(nn.Module):
    """A block, hidden states (b, t, width) to the same.

    Attributes
    ----------
    layer
        The block of the model's own class.
    """

    per_row = ("attention_mask", "position_ids")
    """The keywords that always have one row per sample."""

    def __init__(self, layer: nn.Module, index: int, arguments: BlockArguments):
        super().__init__()
        self.layer = layer
        self._index = index
        self._arguments = arguments

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """The block's forward.

        Parameters
        ----------
        attention_mask
            (b, t), 1 for tokens and 0 for padding; None if there is no padding.
        position_ids
            (b, t); None for 0 to t - 1.
        """
        args, keywords = self._arguments.of(self._index, hidden, attention_mask, position_ids)
        output: Tensor = self.layer(hidden, *args, **keywords)
        return output


class _DecoderOutput:
    """What a decoder returns: the hidden states, and None for everything optional."""

    def __init__(self, last_hidden_state: Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Norms(nn.Module):
    """Stands for the decoder in the head: only the modules after the last block."""

    def __init__(self, modules: Mapping[str, nn.Module]):
        super().__init__()
        self._names = tuple(modules)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """The decoder's output."""
        hidden = inputs_embeds
        for name in self._names:
            hidden = getattr(self, name)(hidden)
        return _DecoderOutput(hidden)


class DecoderHead(nn.Module):
    """The final norm and the language-model head.

    Maps hidden states (b, t, width) to logits (b, t, vocabulary).
    """

    def __init__(self, anatomy: Anatomy, modules: Mapping[str, nn.Module]):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        norms = _Norms({name: modules[name] for name in anatomy.after})
        replaced = {name: modules[name] for name in anatomy.ends}
        self.__dict__["_model"] = _without(anatomy.model, {anatomy.decoder: norms, **replaced})  # not a child
        self._options = {"output_router_logits": False} if _takes_routing(anatomy.model) else {}

    def forward(self, hidden: Tensor) -> Tensor:
        """The language model's forward after its blocks, with its scaling or capping of logits."""
        model: Any = self._model
        logits: Tensor = model(inputs_embeds=hidden, use_cache=False, **self._options).logits
        return logits


def _takes_routing(model: Any) -> bool:
    return "output_router_logits" in inspect.signature(type(model).forward).parameters
