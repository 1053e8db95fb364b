"""``python -m benchmarks soak``: draw, check and count problems; stop at the first contradiction."""

from __future__ import annotations

import argparse
import json
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from zbv_worker.commands.arguments import positive_number

if TYPE_CHECKING:
    from benchmarks.soak.checks import Coverage

PROGRESS_SECONDS = 30.0
Say = Callable[[str], None]


def add_soak(commands: Any) -> None:
    """Add the soak test."""
    command = commands.add_parser(
        "soak",
        help="compare bounds and plans of random problems with an independent exact model",
        description="Draw random problems until the time is up. Compare bounds and plans with exact optima "
        "from an independent model. The status is 1 if a bound or a plan was contradicted.",
    )
    command.add_argument(
        "--minutes", type=positive_number, default=2.0, metavar="N", help="how long to run (default: 2)"
    )
    command.add_argument("--seed", type=int, metavar="N", help="repeat the run with this seed")
    folder, text = Path("build/soak"), "directory for contradictions (default: build/soak)"
    command.add_argument("-o", "--output", type=Path, default=folder, metavar="DIR", help=text)
    command.add_argument("--replay", type=Path, metavar="FILE", help="check only the problem in this file")
    command.set_defaults(run=_soak)


def _soak(parsed: argparse.Namespace) -> int:
    if parsed.replay is not None:
        return 0 if replay(parsed.replay) else 1
    seed = secrets.randbelow(2**31) if parsed.seed is None else parsed.seed
    print(f"seed {seed}", flush=True)
    say = partial(print, flush=True)
    ended = soak(seed, parsed.output, seconds=60 * parsed.minutes, say=say)
    print(summary(ended), flush=True)
    return 0 if ended.found is None else 1


@dataclass(frozen=True)
class Ended:
    """The end of a run."""

    coverage: Coverage
    seconds: float
    found: Path | None = None
    """The file of the contradiction that stopped it, or None."""
    detail: str = ""
    """What was found, and how to reproduce it."""


def soak(
    seed: int,
    directory: Path,
    *,
    seconds: float = float("inf"),
    problems: float = float("inf"),
    say: Say = print,
) -> Ended:
    """Check random problems until the time is up, the number is reached, or there is a contradiction."""
    from benchmarks.soak.checks import Coverage
    from benchmarks.soak.draw import draw

    coverage, began, number = Coverage(), time.monotonic(), 0
    shown = began
    while time.monotonic() - began < seconds and number < problems:
        kind, document = draw(Random(f"{seed}/{number}"))
        found = examine(kind, document, f"{seed}/{number}/checks", coverage)
        if found is not None:
            path = _write(directory, found)
            detail = (
                f"{found['traceback'] or ''}problem {number} of seed {seed}: {found['found']}\n"
                f"to reproduce it: python -m benchmarks soak --replay {path}"
            )
            return Ended(coverage, time.monotonic() - began, path, detail)
        number += 1
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            say(f"{shown - began:6.0f} s: {number} problems, {coverage.checks.total()} checks, nothing found")
    return Ended(coverage, time.monotonic() - began)


def examine(kind: str, document: dict[str, Any], seed: str, coverage: Coverage) -> dict[str, Any] | None:
    """Return the contradiction about a problem as a document, or None.

    Any exception counts, because a valid problem must not raise one.
    """
    from benchmarks.soak.checks import Contradiction, check

    try:
        check(kind, document, seed, coverage)
    except Contradiction as contradiction:
        found, details = str(contradiction), None
    except Exception as error:
        found, details = f"{type(error).__name__}: {error}", traceback.format_exc()
    else:
        return None
    return {"found": found, "traceback": details, "kind": kind, "seed": seed, "problem": document}


def replay(path: Path, say: Say = print) -> bool:
    """Check the problem of a file again; returns whether there is no contradiction any more."""
    from benchmarks.soak.checks import Coverage

    case = json.loads(path.read_text())
    found = examine(case["kind"], case["problem"], case["seed"], Coverage())
    if found is None:
        say(f"there is no contradiction any more; the file says: {case['found']}")
        return True
    say(found["traceback"] or found["found"])
    return False


def _write(directory: Path, case: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"contradiction-{case['seed'].replace('/', '-').removesuffix('-checks')}.json"
    command = f"python -m benchmarks soak --replay {path}"
    path.write_text(json.dumps({"command": command, **case}, indent=1) + "\n")
    return path


def summary(ended: Ended) -> str:
    """Return the counts as tables, and what was found last, where a log's end shows it."""
    coverage, lines = ended.coverage, []
    lines.append(f"{sum(coverage.problems.values())} problems in {ended.seconds:.0f} s")
    lines.append(f"\n{'problems of kind':32}{'drawn':>8}{'exact optimum':>15}")
    for kind in sorted(coverage.problems):
        lines.append(f"{kind:32}{coverage.problems[kind]:8}{coverage.exact[kind]:15}")
    lines.append(f"\n{'largest optimum / bound - 1':32}{'':8}{'gap':>15}")
    for (kind, name), gap in sorted(coverage.gaps.items()):
        lines.append(f"{kind + ', ' + name:40}{gap:15.4f}")
    lines.append(f"\n{'check':40}{'made':>15}")
    for name in sorted(coverage.checks):
        lines.append(f"{name:40}{coverage.checks[name]:15}")
    if ended.detail:
        lines.append(f"\n{ended.detail}")
    return "\n".join(lines)
