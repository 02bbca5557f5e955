"""How an attempt can end, and what follows for its call: the outcome table (behaviour, section 8). No Django.

Endings are values. Exceptions stop at ``executor.perform``, which turns them into one of these.
"""

from dataclasses import dataclass

from toolcalls.codes import DID_NOT_RUN
from toolcalls.effects import EffectRules
from toolcalls.states import Status


@dataclass(frozen=True)
class Succeeded:
    """The tool returned. ``warning`` says what of its result could not be kept, or how it is off its schema."""

    result: str
    raw: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Refused:
    """The tool says that it failed for good; ``retry`` is its own advice, or empty."""

    code: str
    message: str
    retry: str = ""


@dataclass(frozen=True)
class NothingSent:
    """Nothing left this machine, or the service promised that it did nothing; it may ask for a delay in seconds."""

    message: str
    retry_after: float | None = None


@dataclass(frozen=True)
class InDoubt:
    """It may have happened. ``code`` is one of TIMEOUT_UNKNOWN, CONNECTION_LOST, WORKER_LOST."""

    code: str
    message: str


@dataclass(frozen=True)
class Crashed:
    """Tool code raised what nobody expected; the traceback is in the log, under the call's ID."""


Ending = Succeeded | Refused | NothingSent | InDoubt | Crashed


@dataclass(frozen=True)
class Standing:
    """What is known of a call at the moment one of its attempts has ended.

    doubt: the code of the latest earlier attempt in doubt of a call that writes, or empty.
    may_go_on: attempts, session clock and spend allow another attempt, and nobody cancelled.
    cancelled: somebody cancelled while the attempt ran.
    only_attempt: the policy gives this call one attempt, so there were no retries to exhaust.
    """

    rules: EffectRules
    doubt: str = ""
    may_go_on: bool = False
    cancelled: bool = False
    only_attempt: bool = False


@dataclass(frozen=True)
class End:
    """The call ends, or becomes unknown."""

    status: Status
    code: str
    message: str = ""
    retry: str = ""


@dataclass(frozen=True)
class Again:
    """The call goes on with another attempt, after the delay the service asked for or else the backoff."""

    retry_after: float | None = None


def doubt_after(ending: Ending, standing: Standing) -> str:
    """Give the code under which the call is in doubt once this attempt has ended; empty where it is not."""
    if not standing.rules.writes:
        return ""
    match ending:
        case InDoubt(code=code):
            return code
        case Crashed():
            return "INTERNAL_ERROR"
    return standing.doubt


def after(ending: Ending, standing: Standing) -> End | Again:
    """Decide what an attempt's ending means for its call: one row of the outcome table."""
    rules = standing.rules
    match ending:
        case Succeeded(warning=""):
            return End(Status.SUCCEEDED, "OK")
        case Succeeded(warning=warning) if rules.writes:
            return End(Status.SUCCEEDED, "OK_WITH_WARNING", warning)
        case Succeeded(warning=warning):
            return End(Status.FAILED, "INVALID_RESULT", f"The tool's result could not be used: {warning}")
        case Refused(code=code, message=message, retry=retry):
            return known_failure(standing, code, message, retry=retry)
        case NothingSent(message=message, retry_after=retry_after):
            if rules.retryable and standing.may_go_on:
                return Again(retry_after)
            if not rules.retryable:
                return known_failure(standing, "NOT_RUN", f"{DID_NOT_RUN}: {message}")
            return _used_up(standing, message)
        case InDoubt(code=code, message=message):
            if rules.retryable and standing.may_go_on:
                return Again()
            return End(Status.OUTCOME_UNKNOWN, code, message) if rules.writes else _used_up(standing, message)
        case Crashed():
            text = "The tool failed in a way its author did not expect."
            status = Status.OUTCOME_UNKNOWN if rules.writes else Status.FAILED
            return End(status, "INTERNAL_ERROR", text)


def known_failure(standing: Standing, code: str, message: str, *, retry: str = "") -> End:
    """End a call as failed, unless an earlier attempt is in doubt: doubt outlives the attempt.

    A refusal, an expiry, a cancel or a limit says nothing about what an earlier attempt did.
    """
    if standing.doubt:
        return End(
            Status.OUTCOME_UNKNOWN, standing.doubt, f"An earlier attempt may have taken effect. Latest: {message}"
        )
    return End(Status.FAILED, code, message, retry)


def _used_up(standing: Standing, message: str) -> End:
    if standing.cancelled:
        return known_failure(standing, "CANCELLED", "Cancelled; no further attempt was made.")
    code = "UPSTREAM_UNAVAILABLE" if standing.only_attempt else "RETRIES_EXHAUSTED"
    return known_failure(standing, code, message)
