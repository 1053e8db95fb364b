"""A causal language model of transformers with data and an optimizer: the models ``transformers:SOURCE`` of
the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbv_worker.adapters.transformers import TransformersLayers, from_transformers
from zbv_worker.errors import InvalidRun, describe_error
from zbv_worker.models.text import mixed_seed, sample


def pipeline_model(
    source: Any,
    *,
    seed: int = 0,
    sequence_length: int = 128,
    sequences: int = 4,
    data: str | None = None,
    learning_rate: float = 1e-4,
    dtype: str | None = None,
) -> CausalLanguageModel:
    """The factory: a configuration or folder as a :class:`zbv_worker.model.PipelineModel` with layers.

    Parameters
    ----------
    source
        As for :func:`~zbv_worker.adapters.transformers.from_transformers`, usually a path.
    sequence_length, sequences
        Tokens per sequence, and sequences per microbatch.
    data
        A text file; None for random tokens. The folder's tokenizer splits it; without a tokenizer every
        byte is a token.
    dtype
        The dtype of parameters, for instance ``"bfloat16"``; None for the configuration's.

    Raises
    ------
    InvalidRun
        If the source or the data cannot be used.
    """
    chosen = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(chosen, torch.dtype):
        raise InvalidRun(f"found dtype={dtype!r}; must be a dtype of torch, for instance 'bfloat16'.")
    for name, value in (("sequence_length", sequence_length), ("sequences", sequences)):
        if not isinstance(value, int) or value < 1:
            raise InvalidRun(f"found {name}={value!r}; must be a positive integer.")
    layers = from_transformers(source, seed=seed, dtype=chosen)
    vocabulary = int(layers.config.vocab_size)
    tokens = None if data is None else _tokens(Path(data), source, vocabulary)
    if tokens is not None and len(tokens) < sequence_length + 2:
        raise InvalidRun(
            f"{data}: found {len(tokens)} tokens; a sequence needs {sequence_length + 2}. Use a longer text, "
            f"or a smaller sequence_length."
        )
    return CausalLanguageModel(layers, seed, sequence_length, sequences, tokens, learning_rate)


class CausalLanguageModel:
    """The pipeline model; its layers are ``embedding``, ``block.0`` and so on, and ``head``."""

    def __init__(
        self,
        layers: TransformersLayers,
        seed: int,
        length: int,
        sequences: int,
        tokens: Tensor | None,
        learning_rate: float,
    ):
        self.layers = layers
        self._seed = seed
        self._shape = (sequences, length)
        self._tokens = tokens
        self._learning_rate = learning_rate

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """Stage k of S: blocks kL/S to (k+1)L/S, with the embedding in the first and the head in the last."""
        names = self.layer_names()
        blocks = len(names) - 2
        first, last = (at * blocks // n_stages for at in (stage, stage + 1))
        begin = 0 if stage == 0 else first + 1
        end = len(names) if stage == n_stages - 1 else last + 1
        return self.build_layers(names[begin:end], device) if begin < end else nn.Sequential()

    def layer_names(self) -> Sequence[str]:
        """The embedding, the blocks, the head."""
        return self.layers.layer_names()

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Layers by name."""
        return self.layers.build_layers(names, device)

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """The embedding's weight and the head's, if they are shared."""
        return self.layers.tied_parameters()

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Tokens twice, as input and as labels, each (sequences, sequence_length)."""
        key = (self._seed, step, index)
        sequences, length = self._shape
        if self._tokens is None:
            generator = torch.Generator().manual_seed(mixed_seed(key))
            tokens = torch.randint(self.layers.config.vocab_size, (sequences, length), generator=generator)
        else:
            tokens, _ = sample(self._tokens, sequences, length, key)
        return tokens, tokens

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of the next token, in nats."""
        total, count = self.loss_sum(output, target)
        return total / count.clamp(min=1)

    def loss_sum(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the cross entropy, and the number of predicted tokens."""
        return self.layers.loss_sum(output, target)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=self._learning_rate)


def _tokens(data: Path, source: Any, vocabulary: int) -> Tensor:
    """The tokens of a text file, int64 (n,)."""
    try:
        content = data.read_bytes()
    except OSError as error:
        raise InvalidRun(
            f"data: cannot read {data} ({error.strerror}); must be a text file. Omit it for random tokens."
        ) from None
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None and any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        tokens = torch.tensor(_tokenised(folder, content.decode("utf-8", errors="replace")))
    else:
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    if len(tokens) and int(tokens.max()) >= vocabulary:
        raise InvalidRun(
            f"data: found the token {int(tokens.max())}, but the model's vocab_size is {vocabulary}. Add the "
            f"model's tokenizer to the folder, or omit data for random tokens."
        )
    return tokens


def _tokenised(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises classes of several libraries
        raise InvalidRun(f"{folder}: cannot load the tokenizer: {describe_error(error)}.") from error
    found: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return found
