"""What is stored, and which moves are legal. Only ``lifecycle`` writes calls, attempts and journal.

The ``@transition`` methods of Call assign fields and nothing else. What PostgreSQL itself refuses stands in
``triggers.py``; partial unique indexes and checks stand here, named as sentences.
"""

import uuid
from datetime import datetime
from typing import Any
from zoneinfo import available_timezones

import uuid_utils
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django_fsm import FSMField, transition

from toolcalls import triggers
from toolcalls.effects import Effect
from toolcalls.states import MOVES, Status

NAME_LENGTH = 200
DIGEST_LENGTH = 64


def new_id() -> uuid.UUID:
    """Make a public ID: a UUIDv7, ordered by time and not guessable."""
    return uuid.UUID(bytes=uuid_utils.uuid7().bytes)


def _is_a_time_zone(value: str) -> None:
    if value not in available_timezones():
        raise ValidationError(f"{value} is not a time zone of the IANA database")


plain_name = RegexValidator(
    r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z", "1 to 63 letters, digits, dots, dashes or underscores"
)


class Team(models.Model):
    """The tenant. Nothing of a team is visible outside it."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    name = models.CharField(max_length=63, unique=True, validators=[plain_name])
    time_zone = models.CharField(max_length=64, default="UTC", validators=[_is_a_time_zone])
    sealed_number = models.BigIntegerField(default=0)
    sealed_hash = models.CharField(max_length=DIGEST_LENGTH, default="", blank=True)

    class Meta:
        triggers = triggers.TEAM

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A user's place in a team, with what the user may do there."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="memberships")
    may_decide = models.BooleanField(default=False)
    may_reconcile = models.BooleanField(default=False)
    may_run_again = models.BooleanField(default=False)
    may_manage_policies = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "team"], name="a_user_is_a_member_of_a_team_once")]

    def __str__(self) -> str:
        return f"{self.user} in {self.team}"


class Agent(models.Model):
    """An API client. Its allow-list, limits and defaults are set by a manager, never by the agent.

    tools: names or patterns (``*`` and ``?``) of the tools it may use. limits: like a policy's, over all its tools.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="agents")
    name = models.CharField(max_length=63, validators=[plain_name])
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    tools = models.JSONField(default=list)
    default_effect = models.CharField(max_length=20, blank=True, choices=[(e.value, e.value) for e in Effect])
    limits = models.JSONField(default=list, blank=True)
    budgets = models.JSONField(default=dict, blank=True)
    enabled = models.BooleanField(default=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "name"], name="an_agent_has_one_name_in_its_team")]

    def __str__(self) -> str:
        return self.name


class AgentKey(models.Model):
    """A 256-bit key of an agent, of which only the SHA-256 is kept."""

    agent = models.ForeignKey(Agent, on_delete=models.CASCADE, related_name="keys")
    digest = models.CharField(max_length=DIGEST_LENGTH, unique=True)
    hint = models.CharField(max_length=12)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.hint}…"


class UserToken(models.Model):
    """A personal token with which an operator uses the REST API; only its SHA-256 is kept."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="dexsite_tokens")
    digest = models.CharField(max_length=DIGEST_LENGTH, unique=True)
    hint = models.CharField(max_length=12)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.hint}…"


class StoredPolicy(models.Model):
    """A team's override for one tool; validated when saved, and again whenever it is read."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="policies")
    tool = models.CharField(max_length=64)
    values = models.JSONField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "tool"], name="a_team_has_one_policy_per_tool")]

    def __str__(self) -> str:
        return f"{self.team}: {self.tool}"


class Brake(models.Model):
    """A pause: of a team, of an agent, of a tool everywhere, or of a tool in one team. While it stands, nothing starts."""

    team = models.ForeignKey(Team, null=True, blank=True, on_delete=models.CASCADE, related_name="brakes")
    agent = models.ForeignKey(Agent, null=True, blank=True, on_delete=models.CASCADE, related_name="brakes")
    tool = models.CharField(max_length=64, blank=True)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(team__isnull=False) | Q(agent__isnull=False) | ~Q(tool=""), name="a_brake_stops_something"
            ),
            models.UniqueConstraint(
                fields=["team", "agent", "tool"], name="a_brake_is_pulled_once", nulls_distinct=False
            ),
        ]

    def __str__(self) -> str:
        return " ".join(str(each) for each in (self.team, self.agent, self.tool) if each)


class Session(models.Model):
    """One run of an agent. ``id`` is ours and goes into keys; ``session_id`` is the agent's own name for it."""

    class Status(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"
        CANCELLED = "cancelled"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="sessions")
    agent = models.ForeignKey(Agent, on_delete=models.PROTECT, related_name="sessions", db_index=False)
    session_id = models.CharField(max_length=NAME_LENGTH)
    status = models.CharField(max_length=10, default=Status.OPEN, choices=Status.choices)
    body_digest = models.CharField(max_length=DIGEST_LENGTH)
    on_behalf_of = models.CharField(max_length=NAME_LENGTH, blank=True)
    default_effect = models.CharField(max_length=20, blank=True)
    allowed_tools = models.JSONField(null=True)
    metadata = models.TextField(blank=True)
    calls_limit = models.BigIntegerField(null=True)
    turns_limit = models.BigIntegerField(null=True)
    seconds_limit = models.BigIntegerField(null=True)
    spend_limit = models.BigIntegerField(null=True)
    calls_used = models.BigIntegerField(default=0)
    turns_used = models.BigIntegerField(default=0)
    spend_used = models.BigIntegerField(default=0)
    opened_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    sealed_number = models.BigIntegerField(default=0)
    sealed_hash = models.CharField(max_length=DIGEST_LENGTH, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["agent", "session_id"], name="an_agent_names_a_session_once"),
            models.CheckConstraint(
                condition=Q(status="open", ended_at=None) | ~Q(status="open") & Q(ended_at__isnull=False),
                name="a_session_is_dated_exactly_when_it_ended",
            ),
        ]
        triggers = triggers.SESSION

    def __str__(self) -> str:
        return self.session_id


class Turn(models.Model):
    """One model response of a session; it may hold several calls and can be cancelled."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    session = models.ForeignKey(Session, on_delete=models.PROTECT, related_name="turns", db_index=False)
    turn_id = models.CharField(max_length=NAME_LENGTH)
    counted = models.BooleanField(default=False)
    opened_at = models.DateTimeField()
    cancelled_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["session", "turn_id"], name="a_session_names_a_turn_once")]

    def __str__(self) -> str:
        return self.turn_id


class LimitRow(models.Model):
    """Nothing but a row to lock: whoever admits under a limit holds it, so shares are decided one after the other."""

    team = models.ForeignKey(Team, on_delete=models.CASCADE, related_name="+")
    scope = models.CharField(max_length=120)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["team", "scope"], name="a_limit_has_one_row_to_lock")]

    def __str__(self) -> str:
        return self.scope


UNRESOLVED = Q(status=Status.OUTCOME_UNKNOWN) | Q(running_again=True, finished_at=None)
"""Of unknown outcome, or ordered to run again and not known since: nobody may repeat the operation meanwhile."""


class CallQuerySet(models.QuerySet["Call"]):
    """The one place that applies tenancy to calls."""

    def of_agent(self, agent: Agent) -> "CallQuerySet":
        """Keep what this agent may see: its own calls."""
        return self.filter(agent=agent)

    def of_operator(self, user: Any) -> "CallQuerySet":
        """Keep what this user may see: the calls of the teams the user is a member of."""
        teams = Membership.objects.filter(user_id=user.pk).values_list("team_id", flat=True)
        # The IDs themselves, not a join: with one team, an index that begins with it gives the order too.
        return self.filter(team_id__in=list(teams))


class Call(models.Model):
    """One proposed use of a tool, and the request for approval at once.

    Frozen when inserted: everything down to ``trace_id``. ``moves`` counts the moves; ``claims`` counts the claims and is the
    fence; ``entered_before`` is how many had entered when a person ordered another run; ``live_attempt`` is the number of the attempt that may record, if any; ``doubt`` is the code of the latest
    attempt in doubt of a call that writes. ``due_at``: from then on a worker may claim it. ``alarm_at``: then a sweep must look at it.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="calls", db_index=False)
    agent = models.ForeignKey(Agent, on_delete=models.PROTECT, related_name="calls", db_index=False)
    session = models.ForeignKey(Session, on_delete=models.PROTECT, related_name="calls", db_index=False)
    turn = models.ForeignKey(Turn, on_delete=models.PROTECT, related_name="calls", db_index=False)
    tool_call_id = models.CharField(max_length=NAME_LENGTH)
    tool = models.CharField(max_length=NAME_LENGTH)
    tool_version = models.CharField(max_length=60, blank=True)
    operation_id = models.CharField(max_length=NAME_LENGTH, blank=True)
    operation = models.CharField(max_length=420, blank=True)
    received = models.TextField(null=True)
    received_hash = models.CharField(max_length=DIGEST_LENGTH)
    arguments = models.TextField(null=True)
    arguments_hash = models.CharField(max_length=DIGEST_LENGTH, blank=True)
    effect = models.CharField(max_length=20, blank=True)
    writes = models.BooleanField()
    retryable = models.BooleanField()
    requires_approval = models.BooleanField(default=False)
    approvers_needed = models.SmallIntegerField(default=1)
    policy = models.TextField(blank=True)
    why = models.TextField(blank=True)
    measures = models.JSONField(null=True)
    summary = models.CharField(max_length=500, blank=True)
    max_attempts = models.SmallIntegerField(default=1)
    timeout = models.IntegerField(default=30)
    grace = models.IntegerField(default=10)
    start_within = models.IntegerField(default=900)
    stored_limit = models.IntegerField(default=1024 * 1024)
    deadline = models.DateTimeField(null=True)
    replay_of = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="replays", db_index=False)
    refers_to = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="+", db_index=False)
    amends = models.OneToOneField("self", null=True, on_delete=models.PROTECT, related_name="amended_by")
    proposed_at = models.DateTimeField()
    trace_id = models.CharField(max_length=32, blank=True)

    status = FSMField(max_length=20, choices=[(s.value, s.value) for s in Status])
    moves = models.IntegerField(db_default=1)
    code = models.CharField(max_length=64, blank=True, db_default="")
    message = models.TextField(blank=True, db_default="")
    retry = models.CharField(max_length=20, blank=True, db_default="")
    result = models.TextField(null=True)
    raw_result = models.TextField(null=True)
    result_hash = models.CharField(max_length=DIGEST_LENGTH, blank=True, db_default="")
    warning = models.TextField(blank=True, db_default="")
    claims = models.IntegerField(db_default=0)
    entered = models.IntegerField(db_default=0)
    entered_before = models.IntegerField(db_default=0)
    live_attempt = models.IntegerField(null=True)
    doubt = models.CharField(max_length=32, blank=True, db_default="")
    running_again = models.BooleanField(db_default=False)
    cancel_asked_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True)
    alarm_at = models.DateTimeField(null=True)
    approved_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    reported_at = models.DateTimeField(null=True)
    settled_verdict = models.CharField(max_length=24, blank=True, db_default="")
    settled_at = models.DateTimeField(null=True)

    objects = CallQuerySet.as_manager()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["turn", "tool_call_id"], name="a_turn_holds_a_call_id_once"),
            models.UniqueConstraint(
                fields=["session", "operation"],
                name="an_operation_is_under_way_or_done_once_in_a_session",
                condition=Q(
                    writes=True,
                    replay_of=None,
                    status__in=[
                        Status.AWAITING_APPROVAL,
                        Status.APPROVED,
                        Status.EXECUTING,
                        Status.OUTCOME_UNKNOWN,
                        Status.SUCCEEDED,
                    ],
                ),
            ),
            models.CheckConstraint(
                condition=Q(
                    finished_at__isnull=False,
                    status__in=[Status.SUCCEEDED, Status.FAILED, Status.REJECTED, Status.BUDGET_EXHAUSTED],
                )
                | Q(
                    finished_at=None,
                    status__in=[Status.AWAITING_APPROVAL, Status.APPROVED, Status.EXECUTING, Status.OUTCOME_UNKNOWN],
                ),
                name="a_call_is_dated_exactly_when_it_is_final",
            ),
            models.CheckConstraint(
                condition=Q(due_at=None) | Q(live_attempt=None, status__in=[Status.APPROVED, Status.EXECUTING]),
                name="only_a_call_that_may_be_claimed_is_due",
            ),
            models.CheckConstraint(
                condition=Q(live_attempt=None) | Q(status=Status.EXECUTING),
                name="only_an_executing_call_has_a_live_attempt",
            ),
            models.CheckConstraint(
                condition=Q(doubt="")
                | Q(writes=True) & ~Q(status__in=[Status.REJECTED, Status.BUDGET_EXHAUSTED, Status.AWAITING_APPROVAL]),
                name="doubt_is_of_writes_that_were_entered",
            ),
        ]
        indexes = [
            models.Index(fields=["retryable", "team", "due_at"], name="calls_due", condition=Q(due_at__isnull=False)),
            models.Index(fields=["team", "alarm_at"], name="calls_with_an_alarm", condition=Q(alarm_at__isnull=False)),
            models.Index(fields=["session", "operation"], name="calls_by_operation"),
            models.Index(
                fields=["session", "operation_id"], name="calls_by_operation_id", condition=~Q(operation_id="")
            ),
            models.Index(
                fields=["agent", "tool", "arguments_hash"],
                name="unresolved_calls_by_arguments",
                condition=UNRESOLVED,
            ),
            models.Index(
                fields=["agent", "operation"],
                name="unresolved_calls_by_operation",
                condition=UNRESOLVED,
            ),
            models.Index(
                fields=["team", "deadline", "id"],
                name="calls_awaiting_approval",
                condition=Q(status=Status.AWAITING_APPROVAL),
            ),
            models.Index(
                fields=["team", "id"], name="calls_of_unknown_outcome", condition=Q(status=Status.OUTCOME_UNKNOWN)
            ),
            models.Index(
                fields=["team", "tool", "proposed_at"],
                name="calls_by_day_for_limits",
                condition=Q(measures__isnull=False),
            ),
            models.Index(fields=["team", "-id"], name="calls_by_team"),
            models.Index(fields=["agent", "-id"], name="calls_by_agent"),
        ]
        triggers = triggers.CALL

    def __str__(self) -> str:
        return f"{self.tool} {self.tool_call_id}"

    @property
    def idempotency_key(self) -> str:
        """Give the key that every attempt passes to the tool: ``session/turn/call``, with the server-made session ID."""
        return f"{self.session_id}/{self.turn.turn_id}/{self.tool_call_id}"

    # The legal moves. Each assigns fields; lifecycle makes them durable and writes the journal line.

    @transition(field=status, source=list(MOVES["approve"][0]), target=MOVES["approve"][1])
    def approve(self, *, at: datetime) -> None:
        self.approved_at = at

    @transition(field=status, source=list(MOVES["reject"][0]), target=MOVES["reject"][1])
    def reject(self, *, code: str, message: str, at: datetime) -> None:
        self._end(code, message, at)

    @transition(field=status, source=list(MOVES["claim"][0]), target=MOVES["claim"][1])
    def claim(self, *, at: datetime) -> None:
        self.started_at = self.started_at or at

    @transition(field=status, source=list(MOVES["succeed"][0]), target=MOVES["succeed"][1])
    def succeed(self, *, code: str, message: str, at: datetime) -> None:
        self._end(code, message, at)

    @transition(field=status, source=list(MOVES["fail"][0]), target=MOVES["fail"][1])
    def fail(self, *, code: str, message: str, at: datetime) -> None:
        self._end(code, message, at)

    @transition(field=status, source=list(MOVES["lose_track"][0]), target=MOVES["lose_track"][1])
    def lose_track(self, *, code: str, message: str) -> None:
        self.code, self.message = code, message

    @transition(field=status, source=list(MOVES["run_again"][0]), target=MOVES["run_again"][1])
    def run_again(self, *, at: datetime) -> None:
        self.running_again, self.code, self.message = True, "", ""
        self.approved_at, self.entered_before = at, self.entered

    def _end(self, code: str, message: str, at: datetime) -> None:
        self.code, self.message, self.finished_at = code, message, at


class Attempt(models.Model):
    """One claim of a call by a worker. ``number`` is the fence; it has entered once tool code may have begun."""

    class State(models.TextChoices):
        CLAIMED = "claimed"
        ENTERED = "entered"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        NOTHING_SENT = "nothing_sent"
        IN_DOUBT = "in_doubt"
        NOT_ENTERED = "not_entered"

    call = models.ForeignKey(Call, on_delete=models.PROTECT, related_name="attempts", db_index=False)
    number = models.IntegerField()
    entered_as = models.IntegerField(null=True)
    worker = models.ForeignKey("Worker", on_delete=models.PROTECT, related_name="attempts", db_index=False)
    state = models.CharField(max_length=12, choices=State.choices, db_default=State.CLAIMED)
    code = models.CharField(max_length=64, blank=True, db_default="")
    message = models.TextField(blank=True, db_default="")
    claimed_at = models.DateTimeField()
    entered_at = models.DateTimeField(null=True)
    deadline = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    spent = models.BigIntegerField(db_default=0)
    late_state = models.CharField(max_length=12, blank=True, db_default="", choices=State.choices)
    late_code = models.CharField(max_length=64, blank=True, db_default="")
    late_text = models.TextField(null=True)
    late_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["call", "number"], name="a_call_numbers_its_claims")]
        indexes = [models.Index(fields=["worker"], name="live_attempts_by_worker", condition=Q(finished_at=None))]
        triggers = triggers.ATTEMPT

    def __str__(self) -> str:
        return f"{self.call_id} #{self.number}"


class JournalLine(models.Model):
    """One append-only line: a move, a policy decision or a note, with actor and time.

    ``id`` is drawn under the call's row lock, so one call's lines are ordered by it. ``detail`` is a reason, a value or
    evidence as JSON text; the line holds its hash, so that retention may empty it once and the chain still verifies.
    """

    id = models.BigAutoField(primary_key=True)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="+", db_index=False)
    session = models.ForeignKey(Session, null=True, on_delete=models.PROTECT, related_name="journal", db_index=False)
    call = models.ForeignKey(Call, null=True, on_delete=models.PROTECT, related_name="journal", db_index=False)
    at = models.DateTimeField()
    event = models.CharField(max_length=40)
    move = models.IntegerField(null=True)
    source = models.CharField(max_length=20, blank=True)
    target = models.CharField(max_length=20, blank=True)
    code = models.CharField(max_length=64, blank=True)
    actor = models.CharField(max_length=NAME_LENGTH)
    attempt = models.IntegerField(null=True)
    detail = models.TextField(null=True)
    detail_hash = models.CharField(max_length=DIGEST_LENGTH, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["call", "move"], name="a_move_has_one_line", condition=Q(move__isnull=False)
            ),
        ]
        indexes = [
            models.Index(fields=["call", "id"], name="journal_by_call", condition=Q(call__isnull=False)),
            models.Index(fields=["session", "id"], name="journal_by_session", condition=Q(session__isnull=False)),
        ]
        triggers = triggers.JOURNAL_LINE

    def __str__(self) -> str:
        return f"{self.event} {self.source}→{self.target}"


class UnsealedLine(models.Model):
    """A line that has no seal yet. A trigger puts every new line here; sealing takes it away."""

    line = models.OneToOneField(JournalLine, primary_key=True, on_delete=models.DO_NOTHING, db_constraint=False)
    chain = models.UUIDField(db_index=True)

    def __str__(self) -> str:
        return str(self.line_id)


class Seal(models.Model):
    """A line's place in its chain (its session's, else its team's): the next number, and a hash over all before it."""

    line = models.OneToOneField(JournalLine, primary_key=True, on_delete=models.PROTECT, related_name="seal")
    chain = models.UUIDField()
    number = models.BigIntegerField()
    hash = models.CharField(max_length=DIGEST_LENGTH)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["chain", "number"], name="a_chain_numbers_its_lines")]
        triggers = triggers.SEAL

    def __str__(self) -> str:
        return f"{self.chain} {self.number}"


class Worker(models.Model):
    """A process that executes calls. Its identity is new at every start.

    suspected_at and suspected_beat: a sweep's note that it was silent; a later sweep compares. gone_at: its attempts
    were settled, and it enters nothing any more under this identity.
    """

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    host = models.CharField(max_length=100)
    pid = models.IntegerField()
    slots = models.IntegerField()
    tools = models.JSONField(default=dict)
    started_at = models.DateTimeField()
    beat_at = models.DateTimeField()
    suspected_at = models.DateTimeField(null=True)
    suspected_beat = models.DateTimeField(null=True)
    gone_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [models.Index(fields=["beat_at"], name="workers_alive", condition=Q(gone_at=None))]

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class Bell(models.Model):
    """Whether a doorbell of a kind of work waits in the broker: ``rung_at`` is set while one does.

    rings_again: how often in a row a sweep rang for work that nobody came for; each time it waits longer.
    """

    kind = models.CharField(primary_key=True, max_length=40)
    rung_at = models.DateTimeField(null=True)
    last_rung_at = models.DateTimeField(null=True)
    rings_again = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.kind


class SweepPass(models.Model):
    """When the latest sweep passed; one row. A long gap voids every suspicion."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return str(self.at)
