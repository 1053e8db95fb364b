"""A model whose layers pass on nested values, take keywords, and add losses by themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from zbv_worker.model.protocol import Microbatch
from zbv_worker.stage.loss import add_auxiliary_loss

LAYERS, WIDTH, WORDS = 8, 6, 11


class Answer(NamedTuple):
    """What the last layer returns."""

    scores: Tensor
    extra: Tensor


class Start(nn.Module):
    """From words to (hidden, memory, positions, mask, None)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.memory = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, data: Mapping[str, Any]) -> tuple[Any, ...]:
        hidden = self.words(data["words"]) * data["scale"]
        positions = torch.arange(hidden.shape[1], dtype=torch.float32).sin()
        return hidden, self.memory, positions, data["words"] % 2, None


class Mix(nn.Module):
    """Mixes hidden and memory; passes positions and mask on, and adds a loss if it has a weight."""

    def __init__(self, weight: float):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight
        self.adds = True
        self.loss = torch.zeros(())

    def forward(
        self, hidden: Tensor, memory: Tensor, positions: Tensor, mask: Tensor, nothing: None
    ) -> tuple[Any, ...]:
        assert nothing is None
        mixed = torch.tanh(self.linear(self.norm(hidden))) * mask[..., None] + hidden
        if self.weight:
            loss = self.weight * mixed.square().mean()
            if self.adds:
                mixed = add_auxiliary_loss(mixed, loss, mask.sum())
            else:
                self.loss = loss
        memory = memory + mixed.mean(1) * positions.mean()
        return mixed, memory, positions, mask, None


class MaskedMix(Mix):
    """The same with a keyword."""

    def forward(  # type: ignore[override]  # one keyword more
        self,
        hidden: Tensor,
        memory: Tensor,
        positions: Tensor,
        mask: Tensor,
        nothing: None,
        *,
        allowed: Tensor,
    ) -> tuple[Any, ...]:
        return super().forward(hidden * allowed[..., None], memory, positions, mask, nothing)


class Gather(nn.Module):
    """From the tuple to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *parts: Any, **keywords: Any) -> dict[str, Any]:
        hidden, memory, positions, mask, _ = parts
        assert set(keywords) == {"allowed", "shift"}
        return {"hidden": self.linear(hidden) + keywords["shift"], "rest": [memory, positions, mask], "n": 3}


class End(nn.Module):
    """From the dict to an answer; writes to the dict, which is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, found: dict[str, Any], shift: Tensor) -> Answer:
        found["hidden"] = found["hidden"] * found["n"]
        return Answer(self.scores(found.pop("hidden")) + shift, found["rest"][0])


class EightLayers:
    """A pipeline model of eight layers, whose parameters depend on a seed and their layer alone."""

    deviation = 0.3

    def __init__(self, seed: int = 0):
        self._seed = seed

    def made(self, at: int) -> nn.Module:
        """A layer with any parameters."""
        raise NotImplementedError

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        """An equal number of layers per stage, as far as they divide."""
        names = self.layer_names()
        first, last = (at * len(names) // n_stages for at in (stage, stage + 1))
        return self.build_layers(names[first:last], device)

    def layer_names(self) -> Sequence[str]:
        return [f"layer{at}" for at in range(LAYERS)]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        return nn.Sequential(OrderedDict((name, self._layer(int(name[-1]))) for name in names)).to(device)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def _layer(self, at: int) -> nn.Module:
        layer = self.made(at)
        # A separate generator, because ranks that are threads share torch's global one.
        generator = torch.Generator().manual_seed(self._seed * 101 + at)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(0.1, self.deviation, generator=generator)
        return layer


class NestedModel(EightLayers):
    """Layers that pass on nested values, take keywords, and add losses."""

    deviation = 0.4

    def __init__(self, seed: int = 0, *, adds: bool = True):
        super().__init__(seed)
        self._adds = adds

    def made(self, at: int) -> nn.Module:
        if at == 0:
            return Start()
        if at == LAYERS - 2:
            return Gather()
        if at == LAYERS - 1:
            return End()
        layer = (MaskedMix if at % 2 else Mix)(weight=0.3 if at in (2, 5) else 0.0)
        layer.adds = self._adds
        return layer

    def microbatch(self, step: int, index: int) -> Microbatch:
        generator = torch.Generator().manual_seed(1000 * self._seed + 100 * step + index)
        words = torch.randint(WORDS, (2, 4), generator=generator)
        allowed = torch.rand(2, 4, generator=generator) < 0.7
        shift = torch.randn(1, generator=generator)
        target = {"words": words.roll(1, 1), "weight": 0.5}
        return Microbatch({"words": words, "scale": 1.5}, target, {"allowed": allowed, "shift": shift})

    def loss(self, output: Answer, target: Mapping[str, Any]) -> Tensor:
        words: Tensor = nn.functional.cross_entropy(output.scores.flatten(0, 1), target["words"].flatten())
        extra: Tensor = target["weight"] * output.extra.square().mean()
        return words + extra


def run_alone(module: nn.Sequential, data: Microbatch) -> tuple[Any, Tensor]:
    """The output of the whole model, called by hand, and the sum of its auxiliary losses."""
    x: Any = data.input
    for at, layer in enumerate(module):
        names = {1: ["allowed"], 3: ["allowed"], 5: ["allowed"], 6: ["allowed", "shift"], 7: ["shift"]}
        keywords = {name: data.keywords[name] for name in names.get(at, [])}
        x = layer(*x, **keywords) if type(x) is tuple else layer(x, **keywords)
    return x, sum((layer.loss for layer in _mixes(module)), torch.zeros(()))


def reference(microbatches: int, seed: int = 0, step: int = 0) -> tuple[dict[str, Tensor], float, float]:
    """Gradients, the loss, and the sum of auxiliary losses, of plain autograd."""
    model = NestedModel(seed, adds=False)
    module = model.build_stage(0, 1, torch.device("cpu"))
    assert isinstance(module, nn.Sequential)
    total = extra = 0.0
    for index in range(microbatches):
        data = model.microbatch(step, index)
        output, auxiliary = run_alone(module, data)
        loss = model.loss(output, data.target)
        ((loss + auxiliary) / microbatches).backward()  # type: ignore[no-untyped-call]  # torch's own
        total, extra = total + float(loss.detach()) / microbatches, extra + float(auxiliary.detach())
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, total, extra


def _mixes(module: nn.Module) -> Iterator[Mix]:
    return (child for child in module.modules() if isinstance(child, Mix))
