"""Reports of contradicted bounds: the problem is kept in a file that the user can attach to a bug report."""

from __future__ import annotations

import hashlib
import json

from zbv_solver.documents.files import write
from zbv_solver.errors import ContradictedBound


def report(error: ContradictedBound) -> str:
    """Write the problem to a file in the working directory; returns the message for the user.

    The file is a problem document that every command accepts. Its name is derived from its content, so the
    same problem is written once.
    """
    text = json.dumps(error.problem, sort_keys=True) + "\n"
    path = f"zbv-contradiction-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    try:
        write(path, text)
    except OSError as failure:
        return f"{error} The problem could not be written to {path}: {failure.strerror}."
    return f"{error} The problem is in {path}."
