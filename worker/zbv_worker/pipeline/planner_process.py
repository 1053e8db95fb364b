"""The process that plans a pipeline's next steps: ``python -m zbv_worker.pipeline.planner_process PARENT``.

It reads JSON lines from its input, a problem first and then one request per step, and answers each request
twice: at once with a constructor's plan, and later with the plan of a search. A line with the key of a step
that has begun takes its request back. The process ends with its parent: when
the input ends, or, because the parent's children may hold that open, when PARENT is no longer its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import IO, Any

_LOOK_SECONDS = 0.5
_WARM_SECONDS = 0.05
_NICENESS = 5
"""Where cores are scarce, the ranks come first."""


def main(parent: int) -> None:
    """Serve requests until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.nice(_NICENESS)
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else may write among the answers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    threading.Thread(target=_read, args=(sys.stdin, requests), daemon=True).start()
    _serve(requests, answers)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)


def _read(lines: IO[str], requests: SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)


def _serve(requests: SimpleQueue[dict[str, Any]], answers: IO[str]) -> None:
    from zbv_solver.errors import ZbvError
    from zbv_solver.problem.reading import parse_problem
    from zbv_solver.search.step_planner import StepPlanner

    from zbv_worker.pipeline.step_plan import answer_of

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    problem = parse_problem(requests.get())
    planner = StepPlanner(problem)
    planner.plan({each.name: each.value for each in problem.features}, seconds=_WARM_SECONDS)
    say({})
    waiting: dict[str, dict[str, Any]] = {}
    while True:
        _receive(requests, waiting)
        key = next(iter(waiting))
        request = waiting.pop(key)
        values = request["values"]
        try:
            say({"key": key, **answer_of(planner.first(values), 0.0)})
            began = time.perf_counter()
            plan = planner.plan(values, seconds=request["seconds"])
            say({"key": key, **answer_of(plan, time.perf_counter() - began)})
        except ZbvError as error:  # the rank finds the same error when the step begins
            say({"key": key, "error": str(error)})


def _receive(requests: SimpleQueue[dict[str, Any]], waiting: dict[str, dict[str, Any]]) -> None:
    """Add all requests that have arrived, without those taken back; wait for one if there is none."""
    while not waiting or not requests.empty():
        request = requests.get()
        if "values" in request:
            waiting[request["key"]] = request
        else:
            waiting.pop(request["key"], None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
