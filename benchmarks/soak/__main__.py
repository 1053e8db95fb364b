"""``python -m benchmarks.soak``: random problems against an independent exact model, until told to stop."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from benchmarks.soak.checks import Extras
from benchmarks.soak.run import replay, soak, summary


def main() -> int:
    """Exit status 1 where something was contradicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to draw problems (default 2)")
    parser.add_argument("--seed", type=int, help="draw the problems of an earlier run again")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("build/soak"),
        help="directory for what is found (build/soak)",
    )
    parser.add_argument("--scaling", action="store_true", help="also multiply all costs by powers of two")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check only the problem of such a file")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return 0 if replay(arguments.replay) else 1
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    ended = soak(
        seed,
        arguments.output,
        seconds=60 * arguments.minutes,
        extras=Extras(arguments.scaling),
        say=lambda line: print(line, flush=True),
    )
    print(summary(ended), flush=True)
    return 0 if ended.found is None else 1


if __name__ == "__main__":
    sys.exit(main())
