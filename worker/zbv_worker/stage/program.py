"""The program that stages run: the settings, device and versions that decide how long an action takes.

A profile records them in its problem, and the problem's plan keeps them. So a run can tell whether the costs
of its plan were measured with the program that it runs.

With mixed precision, parameters, gradients and optimizer state keep the model's dtype; autocast selects the
operators that compute in the smaller dtype (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "float16"]

AUTOCAST: dict[Precision, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtype of autocast; None for no autocast."""


@dataclass(frozen=True)
class Program:
    """How stages compute; equal on all ranks."""

    precision: Precision = "float32"
    is_compiled: bool = False
    """Whether ``torch.compile`` compiles the layers."""
    has_main_gradients: bool = True
    """Whether parameters in half precision sum their gradients in float32
    (:mod:`zbv_worker.stage.main_gradients`)."""

    def described(self, device: torch.device) -> dict[str, str]:
        """Names and values of everything that decides how long an action takes on this device.

        Call it after the model was built, because its module may change settings of torch.
        """
        found = {
            "precision": self.precision,
            "compile": _yes_or_no(self.is_compiled),
            "main gradients": _yes_or_no(self.has_main_gradients),
            "tf32": _yes_or_no(_uses_tf32(device)),
            "device": _device_name(device),
            "torch": torch.__version__,
        }
        if device.type == "cuda":
            found["cuda"] = str(torch.version.cuda)
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return found


PLAIN = Program()
"""No autocast."""


def differences(planned: Mapping[str, str], own: Mapping[str, str]) -> Iterator[str]:
    """Describe every difference between the program whose costs were planned with, and this one.

    Yields nothing if the plan does not say.
    """
    if planned:
        for name in sorted({*planned, *own}):
            before, now = planned.get(name, "not stated"), own.get(name, "not used")
            if before != now:
                yield f"{name} {before} (here: {now})"


def _yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _uses_tf32(device: torch.device) -> bool:
    """Whether products of float32 matrices are computed in TF32."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Not allow_tf32: reading it fails in models that use the newer setting.
    return bool(backend.matmul.fp32_precision == "tf32")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
