"""``zbv-worker check``: options, lines and exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from zbv_solver.commands.interrupt import terminated_like_interrupted
from zbv_solver.commands.parser import Parser

from zbv_worker.commands.arguments import positive

_EPILOG = """\
examples:
  zbv-worker check
  zbv-worker check --device cpu --json

docs/without-a-gpu.md says what `make gpu` tests in addition, in a checkout.

exit status: 0 nothing failed; 1 a check failed, or no GPU was found; 2 wrong input.
"""


def add_check(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    check = commands.add_parser(
        "check",
        help="check in about a minute whether this node can train",
        description="Check this node before training: its devices and versions, the environment variables "
        "of CUDA and NCCL, whether receives that wait on a GPU stop it (needs two GPUs), and whether one "
        "step of a small pipeline has the gradients of one process.",
        epilog=_EPILOG,
    )
    check.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu needs no GPU (default cuda)"
    )
    check.add_argument(
        "--ranks",
        type=positive,
        metavar="P",
        help="ranks of the pipeline, at least 2 (default: one per GPU). They share GPUs if there are too few",
    )
    check.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    check.set_defaults(execute=execute)


@terminated_like_interrupted()  # otherwise the ranks would go on
def execute(parsed: argparse.Namespace) -> int:
    """Check and print; returns the exit status."""
    from zbv_worker.check import check_node
    from zbv_worker.errors import InvalidRun

    if parsed.ranks == 1:
        raise InvalidRun("--ranks: found 1; must be at least 2, because a pipeline transfers tensors.")
    findings = []
    for finding in check_node(parsed.device, parsed.ranks):
        findings.append(finding)
        if not parsed.json:
            print(f"{finding.verdict:8} {finding.name}: {finding.text}", flush=True)
    has_passed = all(finding.verdict != "fail" for finding in findings)
    if parsed.json:
        print(json.dumps({"passed": has_passed, "checks": [*map(asdict, findings)]}, indent=2))
    return 0 if has_passed else 1
