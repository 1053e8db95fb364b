"""``zbv check``: verify a plan file."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from zbv_solver.commands.interrupt import interruptible
from zbv_solver.documents.files import file_label
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.reading import load_plan_document
from zbv_solver.problem.reading import load_problem
from zbv_solver.search.claims import Claim, check_plan


def check(arguments: argparse.Namespace) -> None:
    """Check every claim of a plan file, and list which of them are verified."""
    asked = load_problem(arguments.problem)
    document = load_plan_document(arguments.plan)
    try:
        checked = interruptible(
            lambda stop: check_plan(document, asked, prove=arguments.prove, cancelled=stop)
        )
    except InvalidInput as error:
        raise error.found_in(file_label(arguments.plan)) from None
    except InvalidPlan as error:
        raise InvalidPlan(f"{file_label(arguments.plan)}: {error}") from None
    if arguments.json:
        result = {"is_valid": True, "claims": [asdict(claim) for claim in checked.claims]}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        lines = ["valid", "verified:", *map(_line, checked.verified)]
        if checked.unverified:
            lines += ["not verified:", *map(_line, checked.unverified)]
        sys.stdout.write("\n".join(lines) + "\n")


def _line(claim: Claim) -> str:
    return f"  {claim.text} ({claim.reason})"
