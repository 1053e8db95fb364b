"""The meaning of each error type and what to do about it, for its page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What an error type means, and what to do."""

    meaning: str
    remedy: str


ADVICE: dict[str, Advice] = {
    "malformed-json": Advice(
        "The body cannot be decoded: it is not JSON, is truncated, contains NaN or infinity, is "
        "nested too deeply, or is declared as gzip and is not.",
        "Send one JSON document in UTF-8. The detail says at which line and column reading stopped.",
    ),
    "unauthenticated": Advice(
        "The service requires a token, and the request had none, or one that is unknown, expired or revoked.",
        "Send a token as Authorization: Bearer …; commands take it from --token-file, ZBV_TOKEN_FILE or "
        "ZBV_TOKEN; zbv-service token create makes one. In a browser, sign in.",
    ),
    "insufficient-scope": Advice(
        "The token is known, but its scopes do not cover the request.",
        "Use a token with the scope that the detail names; zbv-service token create --scope makes one.",
    ),
    "other-origin": Advice(
        "A browser sent the request with its session cookie from a page of another site. The user may not "
        "know of the request, so it is refused.",
        "Use the service's own pages, or send a token in Authorization. A proxy must pass Host on unchanged.",
    ),
    "agent-of-others": Advice(
        "The token did not register this agent. Only the token that did, or one with the scope admin, may "
        "act for it.",
        "Use the token that registered the agent, or register the node again under a new id. Agents of "
        "zbv-worker do so by themselves when their token changes.",
    ),
    "not-found": Advice(
        "Nothing has this address, or the search, plan, run or agent does not exist or was removed.",
        "Look at the list of the collection, such as /v1/searches; /openapi.json has every address.",
    ),
    "method-not-allowed": Advice(
        "The address exists, but accepts other methods.",
        "Use one of the methods in the answer's Allow field.",
    ),
    "body-too-slow": Advice(
        "The body of the request stopped arriving or arrived too slowly.",
        "Send it again over a better connection. The operator may allow more time (ZBV_REQUEST_SECONDS).",
    ),
    "conflict": Advice(
        "The state of a run does not allow this, such as a change of plan before there is one; or a run "
        "waits for the plan of the search.",
        "Read the run's state first; the detail says which states allow it, or which run to cancel.",
    ),
    "agent-gone": Advice(
        "The agent was silent for too long and is lost, or it has left. Its part of a run is over; "
        "the run failed, or starts again if it has retries left.",
        "Register again, under a new id.",
    ),
    "body-too-large": Advice(
        "The body is larger than the operator allows; a compressed body counts with its decompressed size.",
        "Send less: fewer microbatches, or layers with repeat. The operator may raise the limit.",
    ),
    "unsupported-media-type": Advice(
        "The body has a content type or encoding that this address does not accept.",
        "Send application/json, and for packed bodies Content-Encoding: gzip.",
    ),
    "invalid-body": Advice(
        "The body is JSON but breaks rules of its document. Nothing was stored.",
        "Each entry of errors points to one value and says what was found and what the rule is.",
    ),
    "invalid-parameter": Advice(
        "A part of the path, of the query or of the header breaks a rule.",
        "Each entry of errors names the parameter, what was found and what the rule is.",
    ),
    "invalid-plan": Advice(
        "The plan cannot be executed as its problem demands: actions are missing, misplaced or in an order "
        "that never starts, memory is exceeded, or stated metrics do not match its orders.",
        "Repair the plan; zbv check reports the same without a service.",
    ),
    "infeasible-memory": Advice(
        "No plan at all fits the problem's memory limit.",
        "Raise the limit to at least smallest_limit (per rank), or reduce the memory of stages.",
    ),
    "too-much-memory": Advice(
        "The service gives every computation and every search the same memory, and this one needs more.",
        "Compute on your own machine, such as by `zbv export`, `zbv plan` or `zbv layout`, which have no "
        "limit; or send a smaller problem. The operator may raise --search-memory.",
    ),
    "time-limit": Advice(
        "The search ended at its time limit, before it had a plan.",
        "Raise options.time_limit, or make the problem smaller; for layouts, fix parts of the layout.",
    ),
    "too-many-searches": Advice(
        "This token has reached its limit of queued and running searches.",
        "Wait for some to end, or cancel some. The operator may raise the limit, for all or for one token.",
    ),
    "too-much-stored": Advice(
        "The token has as many searches, plans, runs, agents or sessions as it may, or "
        "they have too many bytes. Only requests that store something are refused.",
        "Remove what is not needed any more; the detail says how. The operator can raise the limits: "
        "--max-stored-bytes-per-token, --max-stored-rows-per-token, --max-agents-per-token.",
    ),
    "internal-error": Advice(
        "The service failed; the request may have been valid.",
        "Give the operator the request_id, under which the log has details. A GET may be repeated. Any other "
        "request may have been carried out: check first; a run can be repeated with its Idempotency-Key.",
    ),
    "contradicted-bound": Advice(
        "A verified plan is better than a lower bound allows, so the plan or the bound is wrong. This is a "
        "bug in zbv, not a mistake in the problem. No plan is returned: its certificate could be false.",
        "Please report it with the problem. A failed search is kept, with its problem, as long as "
        "ZBV_KEEP_PLAN_DAYS says. Searching again with another effort or seed may find a plan.",
    ),
    "search-crashed": Advice(
        "The process of the search died several times, most often because memory ran out.",
        "Try fewer microbatches or less effort, or give the service's machine more memory.",
    ),
    "run-failed": Advice(
        "The run ended without success: no retries are left, or another try would fail in the same way.",
        "The failures of ranks come causes first, with rank, action and peer. The logs of ranks have more.",
    ),
    "missing-dependency": Advice(
        "The operation needs a package that is not installed where the service runs.",
        "The detail names the package and the command that installs it.",
    ),
    "not-ready": Advice(
        "The service starts, stops, or cannot reach its database.",
        "Try again in a moment; clients that respect Retry-After do so automatically. A request other than "
        "GET may have been carried out: check first; a run can be repeated with its Idempotency-Key.",
    ),
}
