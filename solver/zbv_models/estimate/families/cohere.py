"""Command (Cohere)."""

from zbv_models.estimate.transformers_kinds import TextKind

TEXT = {"cohere": TextKind(), "cohere2": TextKind(window="alternate", full_every=4)}
