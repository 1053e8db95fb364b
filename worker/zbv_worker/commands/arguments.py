"""Command-line options that several commands share, and their output files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zbv_service.client.flags import add_server
from zbv_solver.documents.files import output

from zbv_worker.errors import InvalidRun

WriteJson = Callable[[Any], None]


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; must be an integer of at least 1")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}; must be a number above 0")
    return value


MODEL_HELP = (
    "the model: a function of a module in the working directory, PYTHONPATH or an installed package, or "
    "transformers:PATH for the folder or configuration of a transformers model; see docs/your-model.md"
)


def add_factory_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of a model's factory."""
    command.add_argument(
        "--model-args", metavar="JSON", help="""keyword arguments of the factory, e.g. '{"layers": 8}'"""
    )
    command.add_argument("--seed", type=int, default=0, help="passed to the factory (default 0)")


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the options that name a model and the hardware to run it on."""
    command.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help=MODEL_HELP)
    add_factory_arguments(command)
    command.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="gloo computes on CPUs, nccl on GPUs (default: nccl if every rank of this host has a GPU)",
    )
    add_timeout(command)


def add_timeout(command: argparse.ArgumentParser) -> None:
    """Add ``--timeout``."""
    command.add_argument(
        "--timeout",
        type=positive_number,
        default=120.0,
        metavar="S",
        help="longest wait for a tensor, or for the other ranks (default 120)",
    )


def add_plan(command: argparse.ArgumentParser, *, are_several: bool) -> None:
    """Add the options for a plan, or for several, and how to execute it."""
    repeated: dict[str, Any] = {"action": "append", "default": []} if are_several else {}
    turns = (
        ". Several plans take turns step by step, each training its own copy of the model, to compare their "
        "times"
    )
    add_server(command, default=None)
    command.add_argument("--plan", metavar="ID", help="id of a plan of the service", **repeated)
    command.add_argument(
        "--plan-file",
        metavar="FILE",
        type=Path,
        help=f"a plan file, instead of --server and --plan{turns if are_several else ''}",
        **repeated,
    )
    command.add_argument(
        "--look-ahead",
        type=positive,
        help="receives posted ahead per channel (default 3, or 1 with NCCL)",
    )
    command.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write the times of all ranks' actions, on one clock, for Perfetto",
    )


def add_program(group: argparse._ActionsContainer) -> None:
    """Add the options that decide how stages compute."""
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of autocast; float16 scales the loss (default float32: no autocast)",
    )
    group.add_argument(
        "--main-gradients",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sum the gradients of parameters in half precision in float32 (default), or in their own dtype",
    )


def add_compile(group: argparse._ActionsContainer) -> None:
    """Add ``--compile``."""
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile every layer with torch.compile; the backward stays split",
    )


@contextmanager
def json_output(flag: str, path: Path | None) -> Iterator[WriteJson]:
    """Open a flag's output file before the work that fills it: :func:`zbv_solver.documents.files.output`.

    Yields
    ------
    A function that writes a document as JSON; without a path it does nothing.

    Raises
    ------
    InvalidRun
        If the path cannot be written.
    """
    if path is None:
        yield lambda document: None
        return
    with ExitStack() as stack:
        try:
            write = stack.enter_context(output(path))
        except OSError as error:
            raise InvalidRun(f"{flag} {path}: {error.strerror}. Give a file that can be written.") from error
        yield lambda document: write(json.dumps(document, indent=2) + "\n")
