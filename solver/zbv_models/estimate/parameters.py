"""Parameter counts of layers."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.shapes import Degrees


@dataclass(frozen=True)
class Parameters:
    """A parameter count, split by how parallelism treats the parameters.

    Attributes
    ----------
    shared
        Parameters of matrices that a tensor-parallel group divides.
    replicated
        Parameters that every device has whole: norms, positions, biases after a sum over the group, routers.
    experts
        Parameters of routed experts, which an expert-parallel group divides.
    chosen
        Parameters of the routed experts that one token uses.
    tables
        Those of ``shared`` that are tables of the vocabulary: embedding and output.
    """

    shared: int
    replicated: int
    experts: int = 0
    chosen: int = 0
    tables: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.shared + other.shared,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.chosen + other.chosen,
            self.tables + other.tables,
        )

    @property
    def total(self) -> int:
        """Count in the whole model."""
        return self.shared + self.replicated + self.experts

    @property
    def active(self) -> int:
        """Count of those that one token uses."""
        return self.shared + self.replicated + self.chosen

    def dense_on(self, degrees: Degrees) -> int:
        """Count on a device, without routed experts."""
        return self.shared // degrees.tensor + self.replicated

    def tables_on(self, degrees: Degrees) -> int:
        """Count of tables' parameters on a device; :meth:`dense_on` includes them."""
        return self.tables // degrees.tensor

    def experts_on(self, degrees: Degrees) -> int:
        """Count of routed experts' parameters on a device."""
        return self.experts // degrees.expert

    def on_device(self, degrees: Degrees) -> int:
        """Count on each device."""
        return self.dense_on(degrees) + self.experts_on(degrees)
