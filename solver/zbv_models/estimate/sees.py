"""Which pairs of queries and keys attention computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sees:
    """Which pairs of queries and keys are computed, and how."""

    flash: bool = True
    """Flash attention keeps no scores; plain attention keeps them."""
    causal: bool = True
    """Whether flash attention leaves out the half of the scores that is masked."""
    window: int | None = None
    """Most tokens that a query attends to; None for all."""
    chunked: bool = False
    """Whether the window is a piece of the sequence, within which queries attend."""

    def pairs(self, sequence: int) -> float:
        """Queries times keys of a sequence: s²; flash attention with a window of w computes 2sw - w².

        Pieces of w tokens have w² each. Of all these, it computes half where the mask is causal (Dao 2023,
        §4.1). Plain attention computes s².
        """
        if not self.flash:
            return float(sequence**2)
        window = sequence if self.window is None else min(self.window, sequence)
        if self.chunked:
            pairs = float(sequence // window * window**2 + (sequence % window) ** 2)
        else:
            pairs = float(2 * sequence * window - window**2)
        return pairs / 2 if self.causal else pairs


@dataclass(frozen=True)
class CompressedSees(Sees):
    """A window of tokens, and compressed tokens before it (DeepSeek-AI 2026, DeepSeek-V4, §2.3)."""

    ratio: int | None = None
    """Tokens that become one; None for the window alone."""
    chosen: int | None = None
    """Compressed tokens that a query attends to at most; None for all."""

    def entries(self, sequence: int) -> Sees:
        """The pairs with compressed tokens, as those of a window, times the ratio."""
        window = None if self.chosen is None else self.chosen * (self.ratio or 1)
        return Sees(self.flash, self.causal, window)

    def pairs(self, sequence: int) -> float:
        """Queries times keys of a sequence: those of the window, and compressed ones.

        Of c compressed tokens that are chosen, a query at place p sees min(p / r, c), for a ratio of r.
        """
        near = super().pairs(sequence)
        return near if self.ratio is None else near + self.entries(sequence).pairs(sequence) / self.ratio


ALL = Sees()
"""Flash attention under a causal mask, without a window."""
