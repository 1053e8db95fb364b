"""Which model a run trains: ``package.module:factory``, or ``transformers:PATH``, and its arguments.

The factory takes keyword arguments (``--model-args``, and ``seed`` if it has that parameter) and returns a
:class:`zbv_worker.model.Model`, or another object that satisfies :class:`zbv_worker.model.PipelineModel`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.host.environment import searched
from zbv_worker.model.protocol import Layered, PipelineModel

_TRANSFORMERS = "transformers"
_TRANSFORMERS_FACTORY = "zbv_worker.adapters.causal_language_model:pipeline_model"
_METHODS = ("build_stage", "microbatch", "loss", "optimizer")


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build; equal on all ranks."""

    factory: str
    """``package.module:name``, or ``transformers:PATH``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, as JSON values."""
    seed: int = 0
    allowed: tuple[str, ...] | None = None
    """The patterns of an agent, which runs factories that others chose (:func:`require_admitted`); None if
    the command's user chose the factory."""

    @classmethod
    def parse(cls, factory: str, arguments: str | None, seed: int) -> ModelSpec:
        """Read the command line's ``--model`` and ``--model-args``; raises :class:`InvalidRun`."""
        try:
            decoded = json.loads(arguments) if arguments else {}
        except json.JSONDecodeError as error:
            raise InvalidRun(
                f"--model-args: found {arguments!r}; must be a JSON object ({error}). "
                f"""Write for example '{{"layers": 8}}'."""
            ) from None
        if not isinstance(decoded, dict):
            raise InvalidRun(
                f"--model-args: found {arguments!r}; must be a JSON object of keyword arguments."
            )
        return cls(factory, decoded, seed)

    def build(self) -> PipelineModel:
        """Call the factory.

        Raises
        ------
        InvalidRun
            If it cannot be found, rejects its arguments, or does not return a pipeline model.
        """
        factory = self._load()
        arguments = dict(self.arguments)
        if _accepts_seed(factory):
            arguments = {"seed": self.seed, **arguments}
        torch.manual_seed(self.seed)  # for factories that use torch's own random numbers
        try:
            inspect.signature(factory).bind(**arguments)
        except TypeError as error:
            raise InvalidRun(
                f"--model {self.factory}: the factory was called with {_listed(arguments)}: {error}. Pass "
                f"""its arguments as --model-args '{{"NAME": VALUE}}'; give other parameters a default."""
            ) from error
        except ValueError:  # a class of C has no signature
            pass
        try:
            model = factory(**arguments)
        except (TypeError, ValueError) as error:
            raise InvalidRun(
                f"--model {self.factory}: the factory, called with {_listed(arguments)}, failed: "
                f"{describe_error(error)}. Check --model-args."
            ) from error
        return self._checked(model)

    def _checked(self, model: object) -> PipelineModel:
        if isinstance(model, PipelineModel):
            return model
        found = f"--model {self.factory}: the factory returned a {type(model).__name__}"
        if isinstance(model, list | tuple | Mapping | nn.Module | Layered):
            raise InvalidRun(
                f"{found}, which has layers but no data. Return zbv_worker.Model(layers, loss=…, data=…), "
                f"where data is a function of step and index that returns (input, target)."
            )
        missing = [name for name in _METHODS if not hasattr(model, name)]
        raise InvalidRun(
            f"{found} without {', '.join(missing)}. Return zbv_worker.Model(layers, loss=…, data=…), or an "
            f"object with all methods of zbv_worker.model.PipelineModel."
        )

    def fingerprint(self, n_stages: int, partition: Sequence[Sequence[str]] | None = None) -> str:
        """A hash of the model as a pipeline of ``n_stages``; equal on ranks that may run together.

        Parameters
        ----------
        partition
            The layers of every stage; None if the model decides.
        """
        parts = [self.factory, dict(self.arguments), self.seed, n_stages]
        parts += [] if partition is None else [partition]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _load(self) -> Callable[..., Any]:
        name, colon, attribute = self.factory.partition(":")
        if not (colon and name and attribute):
            raise InvalidRun(
                f"--model: found {self.factory!r}; must be package.module:factory, or transformers:PATH for "
                f"the folder or configuration of a transformers model."
            )
        if self.allowed is not None:
            require_named(self.factory, self.allowed)
        if name == _TRANSFORMERS:
            return self._transformers(attribute)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name.endswith(".py"):
                raise InvalidRun(
                    f"--model: found {self.factory!r}; must name a module, not a file: "
                    f"{Path(name).stem}:{attribute}, from the directory of the file."
                ) from None
            raise InvalidRun(
                f"--model {self.factory}: found no module {error.name!r}; looked in {searched()}. "
                f"Install it, or add its directory to PYTHONPATH (for an agent: --path DIR)."
            ) from None
        except Exception as error:  # whatever the user's module raises
            raise InvalidRun(
                f"--model {self.factory}: importing {name} failed: {describe_error(error)}."
            ) from error
        factory = getattr(module, attribute, None)
        if not callable(factory) or isinstance(factory, nn.Module):
            raise InvalidRun(f"--model {self.factory}: {_why_no_factory(module, attribute, factory)}")
        if self.allowed is not None:
            require_admitted(self.factory, factory, self.allowed)
        return factory  # type: ignore[no-any-return]  # what the user's module holds is Any

    def _transformers(self, source: str) -> Callable[..., Any]:
        """The factory of a model of transformers."""
        data = self.arguments.get("data")
        if self.allowed is not None and data is not None:
            require_named(f"{_TRANSFORMERS}:{data}", self.allowed)
        if "source" in self.arguments:
            raise InvalidRun(
                f"--model-args: found 'source', but --model {_TRANSFORMERS}:PATH names it. Omit 'source'."
            )
        home, _, name = _TRANSFORMERS_FACTORY.partition(":")
        return partial(getattr(importlib.import_module(home), name), source)


def _accepts_seed(factory: Callable[..., Any]) -> bool:
    """Whether a factory takes ``seed``."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return True
    return "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _listed(arguments: Mapping[str, Any]) -> str:
    """Arguments in words."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"


def _why_no_factory(module: ModuleType, name: str, found: object) -> str:
    """Why a name of a module is no factory, and what to do."""
    if found is not None:
        return (
            f"{module.__name__}.{name} is a {type(found).__name__}; must be a function. Write a function "
            f"that returns it: def build(): return {name}"
        )
    own = [
        other
        for other, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not other.startswith("_")
    ]
    like = get_close_matches(name, own, n=1) or own[:1]
    hint = f" Did you mean {module.__name__}:{like[0]}?" if like else " Define a function of that name."
    return f"{module.__name__} has no function {name!r}.{hint}"


def require_named(factory: str, patterns: Sequence[str]) -> None:
    """Check a factory's name before its module is imported; raises :class:`InvalidRun`."""
    from zbv_service.client.admission import how_to_allow

    from zbv_worker.host.environment import is_model_admitted

    if not is_model_admitted(factory, patterns):
        raise InvalidRun(
            f"--model {factory}: this agent allows {', '.join(patterns) or 'none'}. {how_to_allow(factory)}"
        )


def require_admitted(factory: str, found: object, patterns: Sequence[str]) -> None:
    """Check that an agent's patterns allow a factory; raises :class:`InvalidRun`.

    A pattern for a module allows the public functions and classes that the module defines. It does not allow
    names that the module imports: otherwise, a module that imports ``os.system`` would let anyone call it. A
    pattern ``module:name`` allows that callable, no matter where it was defined.
    """
    module, _, name = factory.partition(":")
    for pattern in patterns:
        of_module, colon, of_name = pattern.partition(":")
        if colon and of_name == name and fnmatchcase(module, of_module):
            return
    home = getattr(found, "__module__", None)
    if name.startswith("_"):
        why = "its name begins with an underscore"
    elif home != module:
        why = f"it is defined in {home or 'another module'}"
    elif not (inspect.isfunction(found) or inspect.isclass(found)):
        why = f"it is a {type(found).__name__}, not a function or class"
    else:
        return
    raise InvalidRun(
        f"--model {factory}: this agent allows functions and classes that {module} defines, but not "
        f"{name}: {why}. Define a function in {module}, or start the agent with --allow-model '{factory}' if "
        f"this callable is safe with any arguments."
    )
