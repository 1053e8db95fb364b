"""What crosses the boundaries between stages, as far as the model states it from a plan's features."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zbv_worker.errors import ModelError, describe_error
from zbv_worker.values.structure import Structure, tensors_of

ShapeOf = Callable[[Mapping[str, float]], Any]
"""See :meth:`zbv_worker.model.protocol.Shaped.shape_of`."""


def stated_structures(
    shape_of: ShapeOf | None, features: Sequence[Mapping[str, float]]
) -> tuple[Structure, ...]:
    """The structures of what crosses every boundary, by microbatch; empty if they are not known.

    Parameters
    ----------
    shape_of
        None if the model does not state them.
    features
        Those of the plan, by microbatch; empty if it has none.

    Raises
    ------
    ModelError
        If the function fails, or returns something else.
    """
    if shape_of is None:
        return ()
    return tuple(_stated(shape_of, each) for each in features)


def _stated(shape_of: ShapeOf, features: Mapping[str, float]) -> Structure:
    shown = ", ".join(f"{name} = {value:g}" for name, value in features.items())
    try:
        found = shape_of(features)
    except Exception as error:
        raise ModelError(
            f"shape_of failed for a microbatch with {shown}: {describe_error(error)}. It gets the plan's "
            f"features, a mapping of names to numbers."
        ) from error
    structure = Structure.of(found)
    if not structure.specs:
        raise ModelError(
            f"shape_of returned {structure} for a microbatch with {shown}; must return what stages pass on, "
            f'with tensors on the meta device: torch.empty(1, int(features["tokens"]), 512, device="meta").'
        )
    wrong = next((each for each in tensors_of(found) if each.device.type != "meta"), None)
    if wrong is not None:
        raise ModelError(
            f"shape_of returned a tensor on {wrong.device}; must be on the meta device, which needs no "
            f'memory: torch.empty(..., device="meta").'
        )
    return structure


def digest_of(stated: Sequence[Structure]) -> str:
    """A text that is equal for equal structures, for the agreement of ranks."""
    if not stated:
        return "not stated"
    return hashlib.sha256("\n".join(map(str, stated)).encode()).hexdigest()
