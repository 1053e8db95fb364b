"""The plan of one step as it travels: from the planner's process to a rank, and from that to its peers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from zbv_solver.plans.orders import Orders
from zbv_solver.plans.plan import Plan

Values = Mapping[str, Sequence[float]]
"""One number per microbatch, by the names of features."""

_ORDERS = {"stage": np.int32, "letter": np.int8, "microbatch": np.int32, "offset": np.int64}


def key_of_values(values: Values) -> str:
    """A text that is equal for equal values."""
    ordered = [[name, [float(each) for each in values[name]]] for name in sorted(values)]
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def answer_of(plan: Plan, seconds: float) -> dict[str, Any]:
    """A plan as JSON: its id, its orders, and how many seconds its search took; 0 for a constructor's."""
    orders = {
        name: base64.b64encode(np.ascontiguousarray(getattr(plan.orders, name), kind).tobytes()).decode()
        for name, kind in _ORDERS.items()
    }
    return {"plan_id": plan.plan_id, "orders": orders, "seconds": seconds}


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step."""

    plan_id: str
    orders: Mapping[str, str]
    """Encoded, see :func:`answer_of`."""
    seconds: float
    """Of its search; 0 for a constructor's plan."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> StepPlan:
        """Read an answer."""
        return cls(answer["plan_id"], answer["orders"], answer["seconds"])

    @property
    def is_searched(self) -> bool:
        """Whether it is more than a constructor's."""
        return self.seconds > 0

    def decoded(self) -> Orders:
        """The orders."""
        return Orders(
            *(np.frombuffer(base64.b64decode(self.orders[name]), kind) for name, kind in _ORDERS.items())
        )
