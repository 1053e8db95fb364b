"""Which model a run trains: ``package.module:factory`` and its arguments.

The factory takes keyword arguments (``--model-args``, and ``seed``) and returns an object that satisfies
:class:`zbv_worker.model.PipelineModel`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.host.search_path import searched
from zbv_worker.model.protocol import PipelineModel


@dataclass(frozen=True)
class ModelSpec:
    """Which model to build; equal on all ranks.

    Attributes
    ----------
    factory
        ``package.module:name``.
    arguments
        Keyword arguments of the factory, as JSON values.
    allowed
        The patterns of an agent, which runs factories that others chose (:func:`require_admitted`); None if
        the command's user chose the factory.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    allowed: tuple[str, ...] | None = None

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
        try:
            model = factory(**{"seed": self.seed, **self.arguments})
        except (TypeError, ValueError) as error:
            raise InvalidRun(
                f"--model {self.factory}: the factory rejects seed={self.seed} and --model-args "
                f"{json.dumps(dict(self.arguments))}: {describe_error(error)}. It must accept these keywords."
            ) from error
        if not isinstance(model, PipelineModel):
            raise InvalidRun(
                f"--model {self.factory}: the factory returned a {type(model).__name__} without build_stage, "
                f"microbatch, loss and optimizer; see zbv_worker.model.PipelineModel."
            )
        return model

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
            raise InvalidRun(f"--model: found {self.factory!r}; must be package.module:factory.")
        if self.allowed is not None:
            require_named(self.factory, self.allowed)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InvalidRun(
                f"--model {self.factory}: found no module {error.name!r}; looked in {searched()}. "
                f"Install it, or add its directory to PYTHONPATH (for an agent: --path DIR)."
            ) from None
        factory = getattr(module, attribute, None)
        if not callable(factory):
            raise InvalidRun(f"--model {self.factory}: {name} has no callable {attribute!r}.")
        if self.allowed is not None:
            require_admitted(self.factory, factory, self.allowed)
        return factory  # type: ignore[no-any-return]  # what the user's module holds is Any


def require_named(factory: str, patterns: Sequence[str]) -> None:
    """Check a factory's name before its module is imported; raises :class:`InvalidRun`."""
    from zbv_service.client.admission import is_model_allowed

    if not is_model_allowed(factory, patterns):
        raise InvalidRun(
            f"--model {factory}: this agent allows {', '.join(patterns) or 'none'}. Start it with "
            f"--allow-model '{factory.partition(':')[0]}' if the module's code may run on this node."
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
