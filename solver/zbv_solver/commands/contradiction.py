"""What a command does with a contradicted bound: it keeps the problem, so that the user can report it."""

from __future__ import annotations

import hashlib
import json

from zbv_solver.documents.files import write
from zbv_solver.errors import ContradictedBound


def report(error: ContradictedBound) -> str:
    """Write the problem to a file in the working directory; a message that says where, or why it could not.

    The file holds the problem document alone, so every command takes it as it is. Its name follows from its
    content: the same problem is written once.
    """
    text = json.dumps(error.problem, sort_keys=True) + "\n"
    path = f"zbv-contradiction-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    try:
        write(path, text)
    except OSError as failure:
        return f"{error} The problem could not be written to {path}: {failure.strerror}."
    return f"{error} The problem is in {path}."
