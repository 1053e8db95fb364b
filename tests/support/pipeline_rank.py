"""A rank of programs that use :class:`zbv_worker.Pipeline`; compares them with one process.

Under torchrun's environment: ``python -m support.pipeline_rank FOLDER PROGRAM …``. The folder has the plan,
and gets what the rank saw.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zbv_worker as zbv
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, TIMEOUT = 8, 6, 60.0
Found = dict[str, Any]


def model() -> nn.Sequential:
    """Layers with equal parameters on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))


def batch(seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of the rows whose first target is positive, and their number."""
    rows = target[:, 0] > 0
    return (output - target).square().mean(1)[rows].sum(), rows.sum()


def pipeline(folder: Path, **more: Any) -> zbv.Pipeline:
    given = {"plan": folder / "plan.json", "loss": nnf.mse_loss, "timeout": TIMEOUT, **more}
    layers = given.pop("layers", None) or model()
    return zbv.Pipeline(given.pop("plan"), layers, startup_timeout=TIMEOUT, **given)


def apart(pipe: zbv.Pipeline, reference: nn.Module) -> float:
    """The largest difference between a gradient of this rank and the reference's."""
    expected = dict(reference.named_parameters())
    differences = []
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        differences.append((parameter.grad - expected[name].grad).abs().max())  # type: ignore[operator]  # not None
    return float(torch.stack(differences).max())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def accumulates(folder: Path) -> Found:
    """Three steps with batches of two sizes, and evaluations of a half; the third step begins again."""
    reference, found = model(), Found(apart=[], loss=[])
    with pipeline(folder) as pipe:
        optimizer = torch.optim.SGD(pipe.named_parameters(), lr=0.1)
        for seed, rows in ((1, ROWS), (2, 2 * ROWS), (3, ROWS)):
            inputs, targets = (torch.cat([each, each])[:rows] for each in batch(seed))
            half = inputs[: rows // 2], targets[: rows // 2]
            expected = nnf.mse_loss(reference(inputs), targets)
            torch.autograd.backward(expected)
            loss, outputs = pipe.step(inputs, targets, outputs=True)
            evaluated = pipe.evaluate(*half)
            found["apart"].append(apart(pipe, reference))
            if loss is not None:
                right = nnf.mse_loss(reference(half[0]), half[1])
                found["loss"] += [abs(float(loss - expected.detach())), abs(float(evaluated - right))]
                found["outputs"] = float((torch.cat(outputs) - reference(inputs)).abs().max())
            else:
                assert outputs is None
            if seed == 2:
                optimizer.zero_grad()
                reference.zero_grad()
        found["names"] = [name for name, _ in pipe.named_parameters()]
    return found


def trains(folder: Path) -> Found:
    """Parameter groups by name, clipping, a fused optimizer and a scheduler, against one process."""
    reference = model()

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        groups = [
            {"params": [(n, p) for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [(n, p) for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.1, fused=True)

    norms = []
    with pipeline(folder) as pipe:
        pairs = []
        for each in (pipe.named_parameters(), reference.named_parameters()):
            made = optimizer(each)
            pairs.append((made, torch.optim.lr_scheduler.LinearLR(made, total_iters=3)))
        for seed in (1, 2, 3):
            inputs, targets = batch(seed)
            torch.autograd.backward(nnf.mse_loss(reference(inputs), targets))
            pipe.step(inputs, targets)
            norm = pipe.clip_grad_norm_(0.05)
            norms.append(abs(float(norm - nn.utils.clip_grad_norm_(reference.parameters(), 0.05))))
            for made, schedule in pairs:
                made.step()
                made.zero_grad()
                schedule.step()
        expected = reference.state_dict()
        mine, whole = pipe.state_dict(), pipe.full_state_dict()
        found = Found(norms=norms, state=_state_apart(mine, expected))
        if whole is not None:
            found["whole"] = _state_apart(whole, expected)
            found["whole names"] = sorted(whole) == sorted(expected)
        pipe.load_state_dict(model().state_dict())
        found["loaded"] = _state_apart(pipe.state_dict(), model().state_dict())
        traces = pipe.trace(folder / "trace.json")
        found["traced"] = [[str(action) for action in trace.actions] for trace in traces]
    return found


def _state_apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float((value - expected[name]).abs().max()) for name, value in found.items())


class Dropping(nn.Module):
    """A layer with a dropout whose forward is checkpointed; records the masks."""

    def __init__(self, masks: list[list[float]]):
        super().__init__()
        self.linear, self.masks = nn.Linear(WIDTH, WIDTH), masks

    def _drop(self, x: Tensor) -> Tensor:
        mask = nnf.dropout(torch.ones_like(x), training=self.training)
        self.masks.append(mask.flatten().tolist())
        y: Tensor = self.linear(x) * mask
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self._drop, x, use_reentrant=False)
        return y


def drops(folder: Path) -> Found:
    """The masks of two steps, of a step after the seed was set again, and the user's own random numbers."""
    found, masks = Found(), list[list[float]]()
    torch.manual_seed(5)
    layers = nn.Sequential(*(Dropping(masks) for _ in range(4)))
    with pipeline(folder, layers=layers) as pipe:
        for name in ("first", "second", "evaluated", "again"):
            masks.clear()
            if name in ("first", "again"):
                torch.manual_seed(7)
            before = torch.get_rng_state()
            (pipe.evaluate if name == "evaluated" else pipe.step)(*batch())
            found[name] = [*masks]
            found[f"state of {name}"] = torch.equal(before, torch.get_rng_state())
            found[f"own {name}"] = torch.rand(2).tolist()
    return found


class Begin(nn.Module):
    """Passes on a tensor, the place of each row's largest number, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        return self.linear(x), x.argmax(1), None


class Between(Begin):
    """Takes all of that, and keywords that it uses with an auxiliary loss."""

    def forward(  # type: ignore[override]
        self, x: Tensor, place: Tensor, constant: None, *, scale: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        assert constant is None
        assert not place.is_floating_point()
        y = self.linear(x * scale).tanh() + place.unsqueeze(1)
        return zbv.add_auxiliary_loss(y, 0.1 * y.square().mean(), weight.sum()), place, None


class End(Begin):
    def forward(self, x: Tensor, *_: object) -> Tensor:  # type: ignore[override]
        y: Tensor = self.linear(x)
        return y


def several() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([Begin(), Between(), Between(), Between(), End()])


def several_batch() -> tuple[Tensor, Tensor, dict[str, Any]]:
    inputs, targets = batch()
    return inputs, targets, {"scale": batch(4)[0][:, :1], "weight": (targets[:, :1] > 0).float()}


def several_trained(sizes: int | list[int] = 2) -> Any:
    """The layers after a plain loop over the microbatches, with gradients."""
    inputs, targets, keywords = several_batch()
    total, weights = torch.zeros(()), torch.zeros(())
    reference: Any = several()
    parts = (torch.split(each, sizes) for each in (inputs, targets, keywords["scale"], keywords["weight"]))
    for x, target, scale, weight in zip(*parts, strict=True):
        y, place, _ = reference[0](x)
        for layer in list(reference)[1:-1]:
            y = layer.linear(y * scale).tanh() + place.unsqueeze(1)
            total = total + 0.1 * y.square().mean() * weight.sum()
        loss, counted = weighted(reference[-1](y), target)
        total, weights = total + loss, weights + counted
    torch.autograd.backward(total / weights)
    return reference


def passes_values(folder: Path) -> Found:
    """Tuples with integers between stages, keywords, and auxiliary losses by weight, against a plain loop."""
    inputs, targets, keywords = several_batch()
    reference = several_trained()
    with pipeline(folder, layers=several(), loss=weighted) as pipe:
        _, outputs = pipe.step(inputs, targets, outputs=True, **keywords)
        found = Found(apart=apart(pipe, reference), outputs=None if outputs is None else len(outputs))
        found["boundaries"] = {str(at): str(each) for at, each in pipe.boundaries.items()}
        found["auxiliary"] = None if pipe.auxiliary_loss is None else float(pipe.auxiliary_loss)
        found["said"] = error_of(lambda: pipe.step(inputs, targets, mask=inputs))
    return found


def varies(folder: Path) -> Found:
    """Nested values of microbatches with different numbers of rows; then a loss that would need weights."""
    inputs, targets, keywords = several_batch()
    found = Found(apart=[])
    with pipeline(folder, layers=several(), loss=weighted) as pipe:
        for sizes in ([1, 3, 3, 1], [2, 1, 1, 4]):
            reference = several_trained(sizes)
            parts = zip(
                *(torch.split(each, sizes) for each in (inputs, targets, *keywords.values())), strict=True
            )
            given = [(x, target, dict(zip(keywords, rest, strict=True))) for x, target, *rest in parts]
            for parameter in pipe.parameters():
                parameter.grad = None
            _, outputs = pipe.step(microbatches=given, outputs=True)
            found["apart"].append(apart(pipe, reference))
            if outputs is not None:
                found["rows"] = [len(each) for each in outputs]
        found["boundaries"] = {str(at): str(each) for at, each in pipe.boundaries.items()}
    pipe = pipeline(folder)
    uneven = list(zip(*(torch.split(each, [1, 3, 2, 2]) for each in (inputs, targets)), strict=True))
    found["said"] = error_of(lambda: pipe.step(microbatches=uneven))
    return found


def shares_data(folder: Path) -> Found:
    """Only one rank has a batch: steps and an evaluation, no batch anywhere, and one on the wrong rank."""
    inputs, targets, keywords = several_batch()
    reference, found = several_trained(), Found(apart=[], evaluated=[], said=[])
    for data_rank in (0, 1):
        has_data = dist_rank() == data_rank
        data, more = ((inputs, targets), keywords) if has_data else ((), {})
        pipe = pipeline(folder, layers=several(), loss=weighted, data_rank=data_rank)
        for wrong in ((), (inputs[:3], targets[:3]) if has_data else ()):
            found["said"].append(error_of(partial(pipe.step, *wrong)))
        loss, outputs = pipe.evaluate(*data, outputs=True, **more)
        first = pipe.step(*data, **more)
        found["apart"].append(apart(pipe, reference))
        # The parameters are the same, so this has the same loss; the microbatches are in another order.
        parts = zip(*(torch.split(each.flip(0), 2) for each in (*data, *more.values())), strict=True)
        given = [(x, target, dict(zip(more, rest, strict=True))) for x, target, *rest in parts]
        second = pipe.step(microbatches=given) if has_data else pipe.step()
        if loss is not None:
            found["evaluated"] += [float(abs(each - loss)) for each in (first, second)] + [len(outputs)]
        pipe.close()
    pipe = pipeline(folder, data_rank=0)
    found["said"].append(error_of(lambda: pipe.step(inputs, targets)))
    return found


def lacks_keyword(folder: Path) -> Found:
    """Only one rank is given a keyword that layers of both take."""
    layers = [Scaled() for _ in range(5)]
    with pipeline(folder, layers=layers) as pipe:
        more: Found = {} if dist_rank() else {"scale": 2.0}
        return Found(said=error_of(partial(pipe.step, *batch(), **more)))


class Scaled(nn.Linear):
    """A layer with an optional keyword."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale)


def factories(folder: Path) -> Found:
    """Only the rank's own layers are built, and have the same parameters on every plan."""
    built: list[str] = []

    def layer(name: str) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            built.append(name)
            return nn.Linear(WIDTH, WIDTH)

        return build

    torch.manual_seed(7)
    layers = {name: layer(name) for name in "abcde"}
    with pipeline(folder, layers=layers) as pipe:
        pipe.step(*batch())
        return Found(built=built, names=sorted({name.partition(".")[0] for name in pipe.state_dict()}))


class Failing(nn.Module):
    """Fails in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ValueError("this layer is broken")
        return x


def fails(folder: Path) -> Found:
    """A layer of rank 1 fails; afterwards a new pipeline works."""
    layers = [*model()]
    layers[2] = nn.Sequential(layers[2], Failing())
    pipe = pipeline(folder, layers=layers)
    return Found(said=[error_of(lambda: pipe.step(*batch())) for _ in range(3)])


def refuses(folder: Path) -> Found:
    """Errors that a rank finds at the start are raised on all ranks."""
    wrong: tuple[Found, ...] = (
        {"layers": [*model()][:2]},
        {"microbatches": 7},
        {"data_rank": 2},
        {"data_rank": dist_rank()},
        {"layers": [*model()][:-1] if dist_rank() else [*model()]},
        {"layers": [*[*model()][:2], (lambda: 3) if dist_rank() else nn.Identity(), *[*model()][3:]]},
        {"layers": [model()[0]] * 5 if dist_rank() else [*model()]},
        {"plan": None, "microbatches": 4, "example": batch()} if dist_rank() else {},
    )
    return Found(said=[error_of(partial(pipeline, folder, **more)) for more in wrong])


def dist_rank() -> int:
    return int(os.environ["RANK"])


def main(folder: Path, *programs: str) -> None:
    torch.set_num_threads(1)
    found = {program: globals()[program](folder) for program in programs}
    (folder / f"rank-{dist_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
