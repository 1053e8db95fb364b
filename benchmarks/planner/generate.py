"""Regenerate the benchmark files: ``python -m benchmarks.planner.generate``.

All costs are whole numbers drawn from plain seeds, so the files are the same on every machine, and a change
of one instance changes one line. ``public.json`` is not generated, because its peers were measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

Document = dict[str, Any]

FOLDER = Path(__file__).parents[1]
BASE = {"forward": 20, "backward_input": 21, "backward_weight": 14}
"""Mean costs of a transformer stage; their proportions are about those of measured stages."""
HEAD = 1.35
"""Factor of the last stage, which has the LM head."""


def heterogeneous(p: int, m: int, share: float, seed: int, objective: str) -> Document:
    """Costs that differ by up to 20 % per stage, with a heavier last stage, in ``share`` of 1F1B's memory."""
    random = Random(seed)
    stages = 2 * p
    costs: Document = {
        letter: [
            round(mean * random.uniform(0.8, 1.2) * (HEAD if stage == stages - 1 else 1))
            for stage in range(stages)
        ]
        for letter, mean in BASE.items()
    }
    return problem(p, m, costs | {"p2p": 1}, share * 4 * p, objective)


def problem(p: int, m: int, costs: Document, limit: float, objective: str = "span") -> Document:
    """A V problem: F allocates 2, I and W release 1 each, and the peak of 1F1B is 4p."""
    memory = {"forward": 2, "backward_input": -1, "backward_weight": -1, "limit": _number(limit)}
    return {
        "pp_degree": p,
        "microbatches": m,
        "objective": objective,
        "costs": costs,
        "memory": memory,
    }


def gaps() -> Iterator[Document]:
    """Large heterogeneous problems, with the gap to prove in a given time."""
    for objective, factor in (("makespan", 1), ("span", 2)):
        for p, m, share, gap, seconds, seeds in (
            (8, 64, 1.0, 0.001, 10, 3),
            (16, 64, 0.7, 0.025, 60, 3),
            (32, 128, 0.7, 0.03, 60, 3),
            (64, 4096, 1.0, 0.003, 10, 1),
        ):
            for seed in range(seeds):
                yield targeted(
                    f"gap-{p}x{m}-{share}-{objective}-{seed}",
                    heterogeneous(p, m, share, seed, objective),
                    gap=gap * factor,
                    seconds=seconds,
                )


def uniform() -> Iterator[Document]:
    """Equal stages in the memory of 1F1B; constructions from the literature solve these."""
    costs_of = {
        "unit": {"forward": 1, "backward_input": 1, "backward_weight": 1, "p2p": 0},
        "19-18-9": {"forward": 19, "backward_input": 18, "backward_weight": 9, "p2p": 1},
    }
    for name, costs in costs_of.items():
        for p in (4, 8, 16, 32, 64):
            for m in (2 * p, 4 * p, 8 * p, 16 * p):
                yield {"name": f"uniform-{name}-{p}x{m}", "problem": problem(p, m, costs, 4 * p)}


def proofs() -> Iterator[Document]:
    """Small problems that the search must prove optimal."""
    for share, seconds in ((1.0, 1), (0.7, 60)):
        for objective in ("makespan", "span"):
            for seed in range(3):
                yield targeted(
                    f"proof-4x8-{share}-{objective}-{seed}",
                    heterogeneous(4, 8, share, seed, objective),
                    gap=0,
                    seconds=seconds,
                )
    for seed, (p, m, limit) in enumerate(((2, 4, 4), (2, 6, 5), (3, 4, 4), (3, 5, 6), (3, 6, 5), (3, 6, 7))):
        for objective in ("makespan", "span"):
            yield targeted(
                f"proof-mixed-{p}x{m}-{limit}-{objective}",
                problem(p, m, mixed_costs(p, seed), limit, objective),
                gap=0,
                seconds=10,
            )


def mixed_costs(p: int, seed: int) -> Document:
    """Irregular costs and transfer times."""
    random = Random(seed)
    costs: Document = {letter: [random.randint(1, 20) for _ in range(2 * p)] for letter in BASE}
    return costs | {"p2p": [random.randint(0, 4) for _ in range(2 * p - 1)]}


def growth() -> Iterator[Document]:
    """Problems of the same kind and of growing size."""
    sizes = [*product((4, 8, 16, 32, 64, 128), (64, 256, 1024, 4096)), (256, 512), (256, 2048), (256, 8192)]
    for p, m in sizes:
        yield {
            "name": f"growth-{p}x{m}",
            "problem": heterogeneous(p, m, 1.0, 0, "span"),
            "options": {"effort": "quick"},
        }


def mixture() -> Iterator[Document]:
    """Forty random problems of ten sizes, from tight memory to that of 1F1B: what does each stage add?"""
    sizes = ((3, 12), (4, 8), (4, 16), (4, 32), (6, 24), (8, 16), (8, 32), (12, 24), (16, 32), (16, 48))
    for seed in range(4 * len(sizes)):
        turn, (p, m) = seed // len(sizes), sizes[seed % len(sizes)]
        share, objective = (0.4, 0.5, 0.7, 1.0)[turn], ("span", "makespan")[(seed + turn) % 2]
        document = heterogeneous(p, m, share, seed, objective)
        if seed % 3 == 2:
            document = problem(p, m, mixed_costs(p, seed), share * 4 * p, objective)
        yield {"name": f"random-{p}x{m}-{share}-{objective}-{seed}", "problem": document}


PROFILES = {
    "1.5B-8x32": (8, 32, (18546, 18097, 9321, 762), (201216, -127488, -73728)),
    "6.2B-8x64": (8, 64, (29802, 29428, 19530, 577), (303104, -172032, -131072)),
    "v6.2B-16x48": (16, 48, (14407, 14380, 9676, 1610), (303104, -172032, -131072)),
    "14.6B-16x48": (16, 48, (10145, 10454, 7877, 755), (378880, -215040, -163840)),
    "v28.3B-32x96": (32, 96, (9458, 9748, 7288, 879), (454656, -258048, -196608)),
}
"""Ranks, microbatches, costs (F, I, W, p2p) and memory per stage: the profiles of ``public.json``. Its 14.6B
model has 24 ranks there; with 16 ranks, stages have 1.5 times as many layers."""
TIGHT = (0.35, 0.4, 0.45, 0.5)
"""Shares of 1F1B's memory."""


def tight() -> Iterator[Document]:
    """Forty problems in 0.35 to 0.5 of the memory of 1F1B: profiled costs, equal stages, uneven stages."""
    for name, (p, m, times, amounts) in PROFILES.items():
        for share in TIGHT:
            costs: Document = dict(zip((*BASE, "p2p"), times, strict=True))
            document = problem(p, m, costs, 0)
            deltas = dict(zip(BASE, amounts, strict=True))
            document["memory"] = deltas | {"limit": _number(share * 2 * p * amounts[0])}
            yield {"name": f"tight-{name}-{share}", "problem": document}
    for share in TIGHT:
        unit = {"forward": 1000, "backward_input": 1000, "backward_weight": 1000, "p2p": 0}
        yield {"name": f"tight-equal-8x32-{share}", "problem": problem(8, 32, unit, share * 32)}
    for seed, (p, m) in enumerate(((8, 24), (8, 48), (16, 64), (32, 128))):
        for share in TIGHT:
            objective = "makespan" if seed == 1 else "span"
            document = heterogeneous(p, m, share, seed, objective)
            yield {"name": f"tight-uneven-{p}x{m}-{share}", "problem": document}


def targeted(name: str, document: Document, *, gap: float, seconds: int) -> Document:
    """An instance with effort thorough, limited to the time of its target."""
    return {
        "name": name,
        "problem": document,
        "reach": {"gap": gap, "seconds": seconds},
        "options": {"effort": "thorough", "time_limit": seconds},
    }


FILES: dict[str, Callable[[], Iterator[Document]]] = {
    "gaps.json": gaps,
    "uniform.json": uniform,
    "proofs.json": proofs,
    "growth.json": growth,
    "random.json": mixture,
    "tight.json": tight,
}


def text_of(name: str) -> str:
    """Return the content of a generated file."""
    instances = FILES[name]
    return written({"about": (instances.__doc__ or "").strip(), "instances": list(instances())})


def written(document: Document) -> str:
    """A benchmark file as text: one line per instance, or per peer if the instance has peers."""
    head = [f" {_line(key)}: {_line(value)},\n" for key, value in document.items() if key != "instances"]
    instances = ",\n".join(f"  {_instance(entry)}" for entry in document["instances"])
    return "{\n" + "".join(head) + ' "instances": [\n' + instances + "\n ]\n}\n"


def _instance(entry: Document) -> str:
    if not entry.get("peers"):
        return _line(entry)
    rest = _line({key: value for key, value in entry.items() if key != "peers"})
    peers = ",\n".join(f"    {_line(name)}: {_line(peer)}" for name, peer in entry["peers"].items())
    return rest[:-1] + ', "peers": {\n' + peers + "\n  }}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> float | int:
    value = round(value, 6)
    return int(value) if value == int(value) else value


if __name__ == "__main__":
    for file in FILES:
        (FOLDER / file).write_text(text_of(file), encoding="utf-8")
