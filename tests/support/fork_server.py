"""Starts processes by forking, so that torch or the service is imported once and not by every process.

``python -m support.fork_server FD MODULE…``, where FD is a socket, and the modules are imported before the
first fork. Each line on the socket requests a process: ``{"id", "module", "arguments", "environment",
"folder", "log"}``. The server answers ``{"id", "pid"}``, and ``{"id", "status"}`` when the process has ended.
The server ends when the socket closes, and its processes end too.

Nothing here may start a thread, a process group or a backward, because a fork would not copy them correctly.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search

from support.problems import uniform

_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1


def main(requests: socket.socket, modules: Sequence[str]) -> None:
    """Fork the requested processes until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end this process, not Ctrl-C
    for name in modules:
        importlib.import_module(name)
    search(uniform(1, 1), SearchOptions(effort="quick"))  # loads the planner's kernels
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"found {threads} threads; only a process with one thread can be forked safely")
    gc.collect()
    gc.freeze()  # garbage collection in a fork would copy shared memory
    running: dict[int, int] = {}
    pending = b""
    while True:
        requests.settimeout(_POLL_SECONDS if running else None)
        try:
            received = requests.recv(1 << 16)
        except TimeoutError:
            received = None
        if received == b"":
            return
        *lines, pending = (pending + (received or b"")).split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = _fork(order, requests)
            running[pid] = order["id"]
            _answer(requests, {"id": order["id"], "pid": pid})
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            _answer(requests, {"id": running.pop(ended[0]), "status": status})


def _answer(requests: socket.socket, document: dict[str, int]) -> None:
    requests.settimeout(None)
    requests.sendall(json.dumps(document).encode() + b"\n")


def _fork(order: dict[str, Any], requests: socket.socket) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        requests.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            status = _run(order)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(order: dict[str, Any]) -> int:
    log = os.open(order["log"], os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.chdir(order["folder"])
    return run_program(order["module"], order["arguments"], order["environment"])


def run_program(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a module as ``python -m`` does, in a fork; returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # an import may have looked it up, before TMPDIR was set
    sys.path[0] = os.getcwd()
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # it runs as __main__, as in a new interpreter
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
