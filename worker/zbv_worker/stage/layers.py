"""How layers are called: positional arguments from the layer before, keywords from the microbatch.

A plain tuple becomes positional arguments, as in ``torch.distributed.pipelining``; any other value, a named
tuple too, is one argument. A layer gets those keywords of the microbatch that its ``forward`` names, or all
if it takes ``**kwargs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.model.loss_module import LOSS
from zbv_worker.stage.whole_batch import Ambiguous, Decisions

NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Keywords:
    """The keyword arguments that some layers take."""

    names: frozenset[str] = frozenset()
    """The parameters of the layers' ``forward``."""
    beyond_first: frozenset[str] = frozenset()
    """The same without the first parameter of each layer, which takes the layer's input."""
    takes_any: bool = False
    """Whether a layer takes ``**kwargs``."""

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> Keywords:
        """The keywords that some layers take."""
        return cls.union(_signature(layer).keywords for layer in layers)

    @classmethod
    def union(cls, several: Iterable[Keywords]) -> Keywords:
        """Those of several layers or stages together."""
        each = list(several)
        return cls(
            frozenset().union(*(one.names for one in each)),
            frozenset().union(*(one.beyond_first for one in each)),
            any(one.takes_any for one in each),
        )

    def __bool__(self) -> bool:
        """Whether the layers may need a keyword."""
        return self.takes_any or bool(self.beyond_first)

    def untaken(self, given: Iterable[str]) -> list[str]:
        """The given keywords that no layer takes."""
        return [] if self.takes_any else [name for name in given if name not in self.names]


@dataclass(frozen=True)
class _Signature:
    positional: tuple[str, ...]
    keywords: Keywords
    decisions: Decisions | None


_KNOWN: WeakKeyDictionary[nn.Module, _Signature] = WeakKeyDictionary()


def _signature(layer: nn.Module) -> _Signature:
    found = _KNOWN.get(layer)
    if found is None:
        if isinstance(layer, LayerSequence):
            found = _Signature((), Keywords.of(layer), None)
        else:
            original = getattr(layer, "_orig_mod", layer)  # of torch.compile
            decisions = Decisions(original, getattr(original, "per_row", ()))
            found = _of_parameters(inspect.signature(original.forward).parameters.values(), decisions)
        _KNOWN[layer] = found
    return found


def _of_parameters(parameters: Iterable[inspect.Parameter], decisions: Decisions) -> _Signature:
    by_position, names, takes_any = [], [], False
    for each in parameters:
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            by_position.append(each.name)
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            names.append(each.name)
        takes_any = takes_any or each.kind == each.VAR_KEYWORD
    beyond = frozenset(names).difference(by_position[:1])
    return _Signature(tuple(by_position), Keywords(frozenset(names), beyond, takes_any), decisions)


def call(layer: nn.Module, x: Any, keywords: Mapping[str, Any], run: Callable[..., Any] | None = None) -> Any:
    """Call a layer; raises :class:`ModelError` if a keyword is also one of the positional arguments.

    An ambiguous keyword is passed whole or in part, see :mod:`zbv_worker.stage.whole_batch`.

    Parameters
    ----------
    run
        Called in place of the layer, for instance its compiled form.
    """
    called = layer if run is None else run
    if not keywords:
        return called(*x) if type(x) is tuple else called(x)
    signature, arguments = _signature(layer), x if type(x) is tuple else (x,)
    taken = signature.keywords
    chosen = {name: v for name, v in keywords.items() if taken.takes_any or name in taken.names}
    for name in signature.positional[: len(arguments)]:
        if name in chosen:
            raise ModelError(
                f"a {type(layer).__name__} gets {name!r} from the layer before and as a keyword of the "
                f"microbatch. Rename the keyword, or the parameter of the layer's forward."
            )
    if signature.decisions is not None and any(type(value) is Ambiguous for value in chosen.values()):
        chosen = signature.decisions.applied(layer, arguments, chosen)
    return called(*arguments, **chosen)


class LayerSequence(nn.Sequential):
    """A Sequential whose layers take several arguments and the keywords of the microbatch."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the layers in order."""
        x = arguments[0] if len(arguments) == 1 else arguments
        for layer in self:
            x = call(layer, x, keywords)
        return x


class _LossAside(nn.Sequential):
    """The last stage's layers, and the modules of the loss: their child, but no layer."""

    def __iter__(self) -> Iterator[nn.Module]:
        return (child for name, child in self._modules.items() if name != LOSS and child is not None)

    def __len__(self) -> int:
        return len(self._modules) - (LOSS in self._modules)  # a slice may be without


class _LayersAndLoss(_LossAside, LayerSequence):
    """The usual class of such a module; it can be pickled."""


def add_loss_module(module: nn.Module, loss: nn.Module) -> None:
    """Make the module of a loss a part of the last stage's module, as ``loss``, in place."""
    if hasattr(module, LOSS):
        raise InvalidRun(
            f"the last stage, a {type(module).__name__}, has an attribute {LOSS!r}, and the loss has "
            f"parameters or buffers, which need that name. Rename the attribute."
        )
    if isinstance(module, nn.Sequential):
        prepare_layers(module)
        kind = type(module)  # of the user, or of fully_shard, if it is no LayerSequence
        is_plain = kind is LayerSequence
        module.__class__ = _LayersAndLoss if is_plain else type(kind.__name__, (_LossAside, kind), {})
    module.add_module(LOSS, loss)


def loss_modules(module: nn.Module) -> list[nn.Module]:
    """The child that :func:`add_loss_module` has added, if there is one."""
    return [module._modules[LOSS]] if isinstance(module, _LossAside) else []


def prepare_layers(module: nn.Module) -> None:
    """Let a plain ``nn.Sequential`` call its modules as layers, in place; changes nothing else.

    Like :func:`~zbv_worker.stage.recorder.defer_weight_gradients` it changes the class, which preserves
    parameters, hooks and state-dict names.
    """
    if type(module) is nn.Sequential:
        module.__class__ = LayerSequence
