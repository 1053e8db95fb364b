"""The environment variables of CUDA, NCCL and torch's NCCL backend that decide whether a pipeline works.

They are read when CUDA starts or when a group is created, so :func:`apply` runs before both. The
table is part of the documentation (docs/nccl.md); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from zbv_worker.errors import InvalidRun

Action = Literal["default", "replace", "group", "refuse", "warn"]
"""``default``: set if absent, another value is reported. ``replace``: set in any case. ``group``: set while
the worker creates a group, because torch reads it then; other groups of the process keep the user's value.
``refuse``: another value ends the run. ``warn``: another value is reported."""


@dataclass(frozen=True)
class Variable:
    """A variable, the value that the worker wants, and what it does about another one."""

    name: str
    wanted: str
    """The value to set; for ``refuse`` and ``warn`` the values that are fine in addition to absence,
    separated by spaces; empty if none is."""
    action: Action
    reason: str


TABLE = (
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "32",
        "replace",
        "Streams that share a hardware queue may block each other forever. Megatron-LM asks for 1.",
    ),
    Variable(
        "CUDA_MODULE_LOADING",
        "EAGER",
        "replace",
        "With lazy loading, the first launch of a kernel may wait for the whole device, receives included.",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "0",
        "refuse",
        "Every launch would wait for its kernel, so a receive posted ahead would stop the rank.",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "",
        "refuse",
        "With any value, even 0, torch calls cudaFree for every freed tensor, and that waits for receives.",
    ),
    Variable(
        "NCCL_MAX_P2P_NCHANNELS",
        "4",
        "default",
        "A waiting receive occupies a multiprocessor per channel. Raise it if transfers limit the speed.",
    ),
    Variable(
        "NCCL_RUNTIME_CONNECT",
        "0",
        "replace",
        "NCCL would connect each algorithm of sums when a step first uses it, and stop the rank meanwhile.",
    ),
    Variable(
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "0",
        "refuse",
        "NCCL would run all communicators' kernels in the host's order, which neighbours do not share.",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "refuse",
        "The host would wait for every tensor, instead of the compute stream.",
    ),
    Variable(
        "NCCL_BLOCKING_WAIT",
        "0",
        "refuse",
        "The older name of TORCH_NCCL_BLOCKING_WAIT.",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "group",
        "Otherwise torch's watchdog ends a failed process before it has written the reason.",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "group",
        "Otherwise torch's monitors may end processes minutes after an error of another rank.",
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "group",
        "Otherwise an error of one rank makes the monitors of all ranks act.",
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "group",
        "Otherwise torch's watchdog ends the process after a CUDA error, before it has written the reason.",
    ),
    Variable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "250",
        "group",
        "After a network error, the watchdog sleeps four times as long, and sends wait for it meanwhile.",
    ),
    Variable(
        "TORCH_NCCL_DESYNC_DEBUG",
        "0",
        "group",
        "It turns the handling of errors by torch's watchdog on again, and needs timing events.",
    ),
    Variable(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "warn",
        "The worker tells the other ranks itself, and says which rank failed first.",
    ),
    Variable(
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "0",
        "warn",
        "The worker's order of connecting is for calls that block; others are untested.",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_TIMING",
        "0",
        "warn",
        "The watchdog then calls CUDA more often, which may hang. The worker uses its own events.",
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF INFO",
        "warn",
        "DETAIL makes the host wait for all ranks of every sum, and lets the watchdog end a failed process.",
    ),
)

_OF_GROUPS = {variable.name: variable.wanted for variable in TABLE if variable.action == "group"}

REPORTED = ("CUDA_VISIBLE_DEVICES", "NCCL_", "TORCH_NCCL_")
"""Names, or their beginnings, of variables that are only reported, such as NCCL_SOCKET_IFNAME."""


def apply(environment: MutableMapping[str, str], *, has_cuda_started: bool = False) -> list[str]:
    """Set what the worker needs; returns a message per changed or doubtful variable.

    Parameters
    ----------
    has_cuda_started
        Whether this process has used CUDA. A variable of CUDA then has no effect any more, so it must have
        had the value before.

    Raises
    ------
    InvalidRun
        If a variable has a value with which a pipeline cannot run, or comes too late.
    """
    if has_cuda_started:
        _require_in_force(environment)
    for refusal in refusals(environment):
        raise InvalidRun(refusal)
    said = []
    for variable in TABLE:
        name, wanted = variable.name, variable.wanted.split()
        found = environment.get(name)
        if variable.action == "replace" or (variable.action == "default" and found is None):
            environment[name] = wanted[0]
        if found is None or found in wanted or variable.action in ("group", "refuse"):
            continue
        change = "now" if variable.action == "replace" else "recommended"
        said.append(f"{name}: found {found}; {change} {wanted[0]}. {variable.reason}")
    return said


def refusals(environment: Mapping[str, str]) -> list[str]:
    """What is wrong with each variable that has a value with which a pipeline cannot run."""
    wrong = []
    for variable in TABLE:
        name, wanted, found = variable.name, variable.wanted.split(), environment.get(variable.name)
        if variable.action == "refuse" and found is not None and found not in wanted:
            fine = ", or ".join([*filter(None, [" or ".join(wanted)]), "absent"])
            wrong.append(f"environment variable {name}: found {found!r}; must be {fine}. {variable.reason}")
    return wrong


@contextmanager
def of_groups(environment: MutableMapping[str, str]) -> Iterator[None]:
    """A context in which torch creates groups of the worker; afterwards the variables are as before.

    Torch reads these variables in the constructor of every group (``ProcessGroupNCCL``). The watchdogs of the
    user's own groups keep their settings, so a hang there is still noticed.
    """
    before = {name: environment.get(name) for name in _OF_GROUPS}
    environment.update(_OF_GROUPS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environment[name]
            else:
                environment[name] = value


def _require_in_force(environment: Mapping[str, str]) -> None:
    """Check the variables that CUDA has read already."""
    late = [
        variable
        for variable in TABLE
        if variable.name.startswith("CUDA_")
        and variable.action == "replace"
        and environment.get(variable.name) not in variable.wanted.split()
    ]
    if late:
        found = ", ".join(
            f"{variable.name}={environment.get(variable.name, '(absent)')}" for variable in late
        )
        wanted = " ".join(f"{variable.name}={variable.wanted}" for variable in late)
        reasons = " ".join(variable.reason for variable in late)
        raise InvalidRun(
            f"found {found}, and CUDA has started in this process, so that a change has no effect. The "
            f"pipeline could wait forever: {reasons} Set {wanted} where the processes are launched."
        )


def found(environment: Mapping[str, str]) -> str:
    """All variables that matter, with their values for the worker's groups, in one line."""
    environment = {**environment, **_OF_GROUPS}
    names = {variable.name for variable in TABLE}
    listed = sorted(name for name in environment if name in names or name.startswith(REPORTED))
    return ", ".join(f"{name}={environment[name]}" for name in listed)
