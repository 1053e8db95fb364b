"""The arguments of ``zbv layout`` and ``zbv-service layout``."""

from __future__ import annotations

import argparse

from zbv_solver.commands.estimate_flags import add_words, flags, words
from zbv_solver.commands.messages import flag_of

FLAGS = (
    *("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_parallel"),
    *("microbatch_size", "zero_stage", "recompute", "recompute_layers", "placement"),
)
"""The parts of a layout that may be fixed."""
STATES = ("precision", "optimizer")
"""Keys of the section ``parallel`` that are flags: what training keeps."""
MODULES = "recompute_modules"
"""A further one: what selective recomputation repeats."""
EXECUTORS = ("zbv", "torch", "megatron", "torchtitan", "any")
CHOICES = {
    "recompute": ("none", "selective", "full", "per-stage"),
    "placement": ("tp-cp-dp-pp", "tp-cp-pp-dp"),
}
HELP = {
    "microbatch_size": "sequences per microbatch",
    "zero_stage": "what replicas share: optimizer states (1), gradients (2), parameters (3)",
    "recompute": "what every stage recomputes; per-stage lets the plan choose none or full for each",
    "recompute_layers": "how many first layers of every stage are recomputed in full (executor megatron)",
    "placement": "kinds of groups, from neighbouring devices to the farthest",
    "precision": "bytes of parameters, gradients and optimizer states (default: by the model's dtype)",
    "optimizer": "which states there are (default: adam)",
}


def add_request(parser: argparse.ArgumentParser) -> None:
    """What is searched, and how hard: the flags that both commands have."""
    known = flags("parallel")
    parser.add_argument("model", nargs="?", help="model (JSON) with global_batch, or a config.json, or -")
    parser.add_argument("--preset", action="append", default=[], metavar="NAME", help="model that zbv knows")
    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster (JSON), or -")
    parser.add_argument("--global-batch", type=int, metavar="INT", help="sequences per step")
    parser.add_argument("--sequence-length", type=int, metavar="INT", help="tokens per sequence")
    for name in STATES:
        parser.add_argument(flag_of(name), choices=words(known[name]), help=HELP[name])
    parser.add_argument(
        "--prediction-layers",
        type=int,
        metavar="INT",
        help="modules of multi-token prediction; 0 drops those of the model",
    )
    add_words(parser, MODULES, known[MODULES])
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="FILE",
        help="problem of `zbv-worker profile`: measured layers replace estimates; repeat it for further "
        "sizes of microbatches",
    )
    parser.add_argument("--top", type=int, default=1, metavar="N", help="layouts to list (default: 1)")
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default=EXECUTORS[0],
        help="program that runs the pipeline; all but zbv have fixed orders (default: zbv)",
    )
    parser.add_argument(
        "--effort",
        choices=("quick", "standard", "thorough"),
        help="search better plans for the most promising layouts (default: constructed orders)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="end the search after this time, once a layout was planned (default: no limit)",
    )
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="also say what other devices, links, memory and batches change",
    )
    parser.add_argument(
        "--points", action="store_true", help="add step and memory of all layouts to the document"
    )
    fixed = parser.add_argument_group("parts of the layout", "the search chooses those that are not given")
    for name in FLAGS:
        if name in CHOICES:
            fixed.add_argument(flag_of(name), choices=CHOICES[name], help=HELP.get(name))
        else:
            fixed.add_argument(flag_of(name), type=int, metavar="INT", help=HELP.get(name))


def given_parallel(arguments: argparse.Namespace) -> dict[str, str | list[str]]:
    """The keys of the section ``parallel`` that were given."""
    names = (*STATES, MODULES)
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}
