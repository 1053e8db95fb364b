"""Packs a batch into microbatches for several replicas. The plans of a brief search show what they take."""

from __future__ import annotations

from zbv_solver.errors import InfeasibleMemory, InvalidInput

from zbv_service.compute.computations import Computations
from zbv_service.documents.parsing import parse_body, parse_json
from zbv_service.errors import INFEASIBLE_MEMORY, ApiError, infeasible
from zbv_service.problems.documents import PackedReplica, PackRequest, ProblemPacking

SECONDS = 5.0
"""Time of all searches together, about: small problems need less, and the first plan of large ones more."""
_SEARCHES = 6
"""Largest number of searches per replica: two arrangements, balanced twice, and some brief ones before."""
_LEAST_SECONDS = 0.01
MAX_SEQUENCES = 2048
MAX_REPLICAS = 64
MAX_CELLS = 65_536
"""Largest number of stages times sequences."""


async def pack_body(computations: Computations, body: bytes | bytearray) -> bytes:
    """The packing of the batch in a request body, as the JSON text of a :class:`ProblemPacking`.

    Raises
    ------
    InvalidInput
        The body breaks a rule.
    ApiError
        400: the body is not JSON. 422: the longest sequence alone does not fit. 503: too many computations
        are waiting, or this one takes too long.
    """
    try:
        return await computations.run(packing_text, body)
    except InfeasibleMemory as error:
        document = infeasible(error)
        issues = [{**issue, "pointer": "/batch/problem/memory/limit"} for issue in document["errors"]]
        raise ApiError(INFEASIBLE_MEMORY, document["detail"], issues) from None


def packing_text(body: bytes | bytearray) -> bytes:
    """Read and pack a batch; runs in another process. Errors are those of :func:`pack_body`."""
    # Imported here because loading the solver's kernels takes a second, which the service should not spend.
    from zbv_solver.packing.batch import to_batch
    from zbv_solver.packing.packing import pack, packing_json
    from zbv_solver.search.options import SearchOptions

    parsed = parse_body(PackRequest, parse_json(body)).batch
    _require_size(len(parsed.sequences), parsed.replicas)
    try:
        batch = to_batch(parsed)
    except InvalidInput as error:
        raise error.below("/batch") from None
    _require_cells(len(batch.sequences), batch.problem.n_stages)
    limit = max(_LEAST_SECONDS, SECONDS / (_SEARCHES * batch.replicas))
    document = packing_json(pack(batch, SearchOptions("quick", time_limit=limit)))
    replicas = [PackedReplica(**each, problem=each["plan"]["problem"]) for each in document.pop("replicas")]
    return ProblemPacking(**document, replicas=replicas).model_dump_json().encode()


def _require_size(sequences: int, replicas: int) -> None:
    for found, most, name in ((sequences, MAX_SEQUENCES, "sequences"), (replicas, MAX_REPLICAS, "replicas")):
        if found > most:
            raise InvalidInput.at(
                f"/batch/{name}", f"found {found}; this service packs at most {most}. {_ELSEWHERE}"
            )


def _require_cells(sequences: int, stages: int) -> None:
    if stages * sequences > MAX_CELLS:
        raise InvalidInput.at(
            "/batch/sequences",
            f"found {sequences} sequences times {stages} stages; this service packs at most {MAX_CELLS}. "
            f"{_ELSEWHERE}",
        )


_ELSEWHERE = "Pack on your own machine with `zbv pack`."
