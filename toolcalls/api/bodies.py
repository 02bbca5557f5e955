"""The bodies of the API: strict on the way in, described on the way out."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from toolcalls.api.problems import Problem
from toolcalls.canonical import MISSING, check_id, parse_body, safe_text

BODY_LIMIT = 1024 * 1024


class StrictParser(BaseParser):
    """Parse a body with the strict parser: no duplicate keys, no NaN, no U+0000, bounded depth. Over 1 MiB is a 413."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> dict[str, Any]:
        raw = stream.read(BODY_LIMIT + 1)
        if len(raw) > BODY_LIMIT:
            raise too_large()
        return parse_body(raw) if raw else {}


def too_large() -> Problem:
    return Problem(413, "TOO_LARGE", f"A body may have at most {BODY_LIMIT:,} bytes.")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Model = TypeVar("Model", bound=BaseModel)


def read(request: Request, model: type[Model]) -> Model:
    """Read a request's body as this model. Raises Problem (400) naming every faulty field; unknown fields are faults."""
    try:
        return model.model_validate(request.data)
    except ValidationError as error:
        errors = [
            {"field": safe_text(".".join(map(str, fault["loc"])), 200), "detail": safe_text(fault["msg"], 300)}
            for fault in error.errors(include_url=False, include_input=False)
        ]
        first = errors[0]
        raise Problem(400, "MALFORMED", f"{first['field'] or 'body'}: {first['detail']}", errors=errors) from None


def _id(what: str) -> Any:
    return AfterValidator(lambda value: check_id(value, what=what))


def _storable(value: str) -> str:
    if safe_text(value) != value:
        raise ValueError("it holds U+0000 or a lone surrogate")
    return value


SessionId = Annotated[str, _id("session_id")]
ToolCallId = Annotated[str, _id("tool_call_id")]
OperationId = Annotated[str, _id("operation_id")]
Text = Annotated[str, AfterValidator(_storable)]
Reason = Annotated[str, AfterValidator(_storable), Field(max_length=10_000)]
Whole = Annotated[int, Field(ge=0, le=10**15)]


class Budgets(Body):
    """Limits of a session; it ends with whichever is reached first."""

    calls: Whole | None = None
    turns: Whole | None = None
    seconds: Annotated[int, Field(ge=1, le=366 * 24 * 3600)] | None = None
    spend: Whole | None = None


class OpenSession(Body):
    """What opens a session. Everything but its name only tightens what the agent may do."""

    session_id: SessionId | None = None
    on_behalf_of: Annotated[Text, Field(max_length=200)] = ""
    default_effect: Literal["read", "idempotent_write", "non_idempotent_write", "unclassified"] | None = None
    allowed_tools: (
        Annotated[list[Annotated[Text, Field(min_length=1, max_length=64)]], Field(max_length=200)] | None
    ) = None
    budgets: Budgets = Budgets()
    metadata: dict[str, Any] = {}


class ProposedCall(Body):
    """One call of a turn. ``arguments`` is an object, or a string that holds one."""

    tool_call_id: ToolCallId
    tool: Annotated[Text, Field(min_length=1, max_length=200)]
    arguments: Any = MISSING
    operation_id: OperationId | None = None


class ProposedTurn(Body):
    """The calls of one model response."""

    calls: Annotated[list[ProposedCall], Field(min_length=1, max_length=100)]


class Acknowledgement(Body):
    """The calls whose answers were received."""

    tool_call_ids: Annotated[list[ToolCallId], Field(min_length=1, max_length=100)]


class Answer(BaseModel):
    """What is answered; documented here, made in ``render``."""


class AttemptAnswer(Answer):
    number: int
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    code: str
    late: dict[str, Any] | None


class DecisionAnswer(Answer):
    decision: str
    reason: str
    at: datetime


class ApprovalAnswer(Answer):
    deadline: datetime | None
    needed: int
    decisions: list[DecisionAnswer]


class SettledAnswer(Answer):
    verdict: str
    at: datetime


class CallAnswer(Answer):
    """A call as it stands."""

    id: str
    session_id: str
    turn_id: str
    tool_call_id: str
    operation_id: str | None
    operation: str
    tool: str
    tool_version: str
    status: Literal[
        "awaiting_approval",
        "approved",
        "executing",
        "outcome_unknown",
        "succeeded",
        "failed",
        "rejected",
        "budget_exhausted",
    ]
    code: str
    message: str
    retry: Literal["new_call_ok", "correct_and_call", "wait", "do_not_retry"]
    replayed: bool
    replay_of: str | None
    refers_to: str | None
    result: Any
    partial: bool
    warning: str
    effect: str
    requires_approval: bool
    policy: dict[str, Any] | None
    arguments: dict[str, Any] | None
    arguments_hash: str
    idempotency_key: str
    attempts: list[AttemptAnswer]
    approval: ApprovalAnswer | None
    settled: SettledAnswer | None
    amended_to: str | None
    amends: str | None
    allowed_next_actions: list[str]
    trace_id: str
    proposed_at: datetime
    approved_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    reported_at: datetime | None


class CallsAnswer(Answer):
    """The calls of a request, in the order asked. A mismatch stands in its place as a problem with status 422."""

    calls: list[CallAnswer | dict[str, Any]]


class CallPage(Answer):
    """A page of calls; ``next`` is the cursor of the following page, or null."""

    calls: list[CallAnswer]
    next: str | None


class BudgetAnswer(Answer):
    limit: int | None
    used: int


class SessionAnswer(Answer):
    """A session as it stands."""

    id: str
    session_id: str
    status: Literal["open", "closed", "cancelled"]
    on_behalf_of: str
    default_effect: str | None
    allowed_tools: list[str] | None
    metadata: dict[str, Any]
    budgets: dict[str, BudgetAnswer]
    opened_at: datetime
    ended_at: datetime | None
    turns: list[dict[str, Any]]
    calls: list[CallAnswer]
    waiting: list[str]
    notes: list[dict[str, Any]]


class CancelledAnswer(Answer):
    """What became of each unfinished call: its new status, or ``cancelling`` while its tool still runs."""

    calls: list[dict[str, str]]


class ToolsAnswer(Answer):
    """Definitions of the tools that this agent may use."""

    tools: list[dict[str, Any]]


class ProblemAnswer(Answer):
    """Problem details (RFC 9457) with a stable code."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[dict[str, Any]] = []
