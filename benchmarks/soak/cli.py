"""``python -m benchmarks soak``."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import Any

from zbv_worker.commands.arguments import positive_number


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
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("build/soak"),
        metavar="DIR",
        help="directory for contradictions (default: build/soak)",
    )
    command.add_argument("--scaling", action="store_true", help="also multiply all costs by powers of two")
    command.add_argument("--replay", type=Path, metavar="FILE", help="check only the problem in this file")
    command.set_defaults(run=_soak)


def _soak(parsed: argparse.Namespace) -> int:
    from benchmarks.soak.run import replay, soak, summary

    if parsed.replay is not None:
        return 0 if replay(parsed.replay) else 1
    seed = secrets.randbelow(2**31) if parsed.seed is None else parsed.seed
    print(f"seed {seed}", flush=True)
    ended = soak(
        seed,
        parsed.output,
        seconds=60 * parsed.minutes,
        scaling=parsed.scaling,
        say=lambda line: print(line, flush=True),
    )
    print(summary(ended), flush=True)
    return 0 if ended.found is None else 1
