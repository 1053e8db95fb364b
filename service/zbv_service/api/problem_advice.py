"""What each type of error means and what to do about it, for the page at its address."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """A sentence or two on what a type means, and on what to do."""

    meaning: str
    remedy: str


ADVICE: dict[str, Advice] = {
    "malformed-request": Advice(
        "What came over the connection is no HTTP/1.1: TLS where the service speaks none, most often.",
        "Check the scheme of the address, http:// or https://, and what stands between you and the service.",
    ),
    "malformed-json": Advice(
        "The body of the request cannot be decoded: it is no JSON, is cut off, holds NaN or an infinity, is "
        "nested too deeply, or is no gzip although it says so.",
        "Send one JSON document in UTF-8. The detail says at which line and column reading stopped.",
    ),
    "invalid-idempotency-key": Advice(
        "The header field Idempotency-Key is there more than once, or is empty, too long, or holds "
        "characters that it may not.",
        "Send one key of up to 255 visible ASCII characters, such as a UUID.",
    ),
    "idempotency-key-in-use": Advice(
        "A request with this Idempotency-Key came in before and is being answered.",
        "Send the request again after the seconds in Retry-After. If the first one was accepted, the answer "
        "is what it created.",
    ),
    "idempotency-key-reused": Advice(
        "This Idempotency-Key came with another body or to another address before. A key names one request.",
        "Send a new key with a new request; to repeat a request, send its body unchanged.",
    ),
    "search-discarded": Advice(
        "The request with this Idempotency-Key was answered with a search that somebody has discarded since.",
        "To search it again, send the request with a new key.",
    ),
    "run-removed": Advice(
        "The request with this Idempotency-Key created a run, which the service has removed since.",
        "To run it again, send the request with a new key.",
    ),
    "search-in-use": Advice(
        "A run was submitted as a problem, and waits for the plan of this search.",
        "Cancel the run first; the detail names it.",
    ),
    "unauthenticated": Advice(
        "The service asks who sends a request, and no token came, or one that is wrong, expired or revoked.",
        "Send a token as Authorization: Bearer …; commands take it from --token-file, ZBV_TOKEN_FILE or "
        "ZBV_TOKEN; zbv-service token create makes one. In a browser, sign in.",
    ),
    "insufficient-scope": Advice(
        "The token is known, but its scopes do not cover the request.",
        "Use a token with the scope that the detail names; zbv-service token create --scope makes one.",
    ),
    "other-origin": Advice(
        "A browser sent the request with the cookie of its session, but for a page of another site. Such "
        "requests may be made without the user's knowledge, so they change nothing.",
        "Use the service's own pages, or send a token in Authorization. A proxy must pass Host on unchanged.",
    ),
    "agent-of-others": Advice(
        "The token did not register this agent. Only the token that did, or one with the scope admin, may "
        "act for it.",
        "Use the token that registered the agent, or register the node again under a new id. Agents of "
        "zbv-worker do so by themselves when their token changes.",
    ),
    "not-found": Advice(
        "Nothing has this address, or the search, plan, run or agent with this id does not exist (any more).",
        "Look at the list of the collection, such as /v1/searches; /openapi.json has every address.",
    ),
    "method-not-allowed": Advice(
        "The address exists, but takes other methods.",
        "Use one of the methods in the answer's Allow field.",
    ),
    "body-too-slow": Advice(
        "The body of the request stopped coming, or came in a trickle, and was not waited for any longer.",
        "Send it again over a better connection. The operator may allow more time (ZBV_REQUEST_SECONDS).",
    ),
    "run-state": Advice(
        "The run is in a state in which this cannot be done, such as a change of plan before it has one.",
        "Read the run's state first; the detail says which states allow it.",
    ),
    "agent-gone": Advice(
        "The agent was silent for too long and counts as lost, or it has left. Its part of a run is over; "
        "the run failed, or starts again when it has retries left.",
        "Register again, under a new id.",
    ),
    "address-too-long": Advice(
        "Path and query together are longer than the service reads.", "Send a shorter address."
    ),
    "headers-too-large": Advice(
        "The header fields together are larger than the service reads.", "Send fewer or shorter fields."
    ),
    "body-too-large": Advice(
        "The body is larger than the operator allows; compressed bodies count as they are unpacked.",
        "Send less: fewer microbatches, or layers with repeat. The operator may raise the limit.",
    ),
    "unsupported-media-type": Advice(
        "The body is declared as something that this address does not read.",
        "Send application/json, and for packed bodies Content-Encoding: gzip.",
    ),
    "invalid-body": Advice(
        "The body is JSON, but breaks rules of its document. Nothing of it was stored.",
        "Each entry of errors points to one value and says what was found and what the rule is.",
    ),
    "invalid-parameter": Advice(
        "A part of the path, of the query or of the header breaks a rule.",
        "Each entry of errors names the parameter, what was found and what the rule is.",
    ),
    "invalid-plan": Advice(
        "The plan cannot be executed as its problem demands: actions are missing, misplaced or in an order "
        "that never starts, memory does not suffice, or stated metrics are not those of its orders.",
        "Repair the plan; zbv check says the same without a service.",
    ),
    "infeasible-memory": Advice(
        "No plan at all fits the problem's memory limit.",
        "Raise the limit at least to smallest_limit, which is given per rank, or lower what stages hold.",
    ),
    "unknown-host": Advice(
        "The Host field of the request names none of the service's names. A service that listens on this "
        "machine alone answers to no others, so that no site can have browsers ask it.",
        "Use the address that the service printed. Behind a proxy, set ZBV_ALLOWED_HOSTS to the public name.",
    ),
    "too-many-searches": Advice(
        "As many searches of this token are queued or running as it may have.",
        "Wait for some to end, or cancel some. The operator may raise the limit, for all or for one token.",
    ),
    "too-many-attempts": Advice(
        "The same wrong token came from this address too often in a short time.",
        "Use a token that works; it is accepted at once. This one is looked up again after Retry-After.",
    ),
    "internal-error": Advice(
        "The service met an error of its own. The request may have been right.",
        "Give the operator the request_id: the log has the rest under it. A GET may be repeated. Any other "
        "request may have been carried out: look first, or repeat it with the Idempotency-Key that it had.",
    ),
    "contradicted-bound": Advice(
        "A verified plan is better than a lower bound allows, so the plan or the bound is wrong. This is a "
        "bug in zbv, not a mistake in the problem. No plan is returned: its certificate could be false.",
        "Please report it with the problem. A failed search is kept, with its problem, as long as "
        "ZBV_KEEP_FAILED_DAYS says. Searching again with another effort or seed may find a plan.",
    ),
    "search-crashed": Advice(
        "The process of the search died several times, most often because memory ran out.",
        "Try fewer microbatches or less effort, or give the service's machine more memory.",
    ),
    "run-failed": Advice(
        "The run ended without success: no retries are left, or another try would fail in the same way.",
        "Failures of ranks name causes before consequences: rank, action and peer. Ranks' logs have more.",
    ),
    "missing-dependency": Advice(
        "The operation needs a package that is not installed where the service runs.",
        "The detail names the package and the command that installs it.",
    ),
    "not-ready": Advice(
        "The service starts, stops, or cannot reach its database.",
        "Ask again in a moment; clients that keep to Retry-After do so by themselves. A request other than "
        "GET may have been carried out: look first, or repeat it with the Idempotency-Key that it had.",
    ),
    "too-many-connections": Advice(
        "As many connections are open as the service takes.",
        "Ask again in a moment, and keep connections for several requests. The operator may allow more "
        "(ZBV_MAX_CONNECTIONS).",
    ),
}
