"""What people decided: the decisions on waiting calls, and the settlements of unknown outcomes. Rows are never changed."""

import pgtrigger
from django.conf import settings
from django.db import models

from toolcalls.models import DIGEST_LENGTH, Call
from toolcalls.triggers import not_emptied


class Decision(models.Model):
    """One person's answer to one waiting call, on the exact arguments that the person saw."""

    class Verdict(models.TextChoices):
        APPROVE = "approve"
        REJECT = "reject"

    class Channel(models.TextChoices):
        DESK = "desk"
        REST = "rest"
        TOKEN = "token"  # noqa: S105 - a channel, not a secret

    call = models.ForeignKey(Call, on_delete=models.PROTECT, related_name="decisions")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    decision = models.CharField(max_length=7, choices=Verdict.choices)
    reason = models.TextField(blank=True)
    arguments_hash = models.CharField(max_length=DIGEST_LENGTH)
    channel = models.CharField(max_length=5, choices=Channel.choices)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["call", "user"], name="a_person_decides_a_call_once")]
        triggers = [
            pgtrigger.ReadOnly(name="a_decision_stands", exclude=["reason"]),
            pgtrigger.Protect(name="a_decision_is_never_deleted", operation=pgtrigger.Delete),
            not_emptied("decisions_are_not_emptied"),
        ]

    def __str__(self) -> str:
        return f"{self.user}: {self.decision}"


class Reconciliation(models.Model):
    """One person's word, with evidence, on what a call of unknown outcome did."""

    class Verdict(models.TextChoices):
        TOOK_EFFECT = "took_effect"
        DID_NOT_TAKE_EFFECT = "did_not_take_effect"
        STILL_UNKNOWN = "still_unknown"
        RUN_AGAIN = "run_again"

    call = models.ForeignKey(Call, on_delete=models.PROTECT, related_name="reconciliations")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    verdict = models.CharField(max_length=20, choices=Verdict.choices)
    evidence = models.TextField()
    result = models.TextField(null=True)
    channel = models.CharField(max_length=5, choices=Decision.Channel.choices)
    at = models.DateTimeField()

    class Meta:
        triggers = [
            pgtrigger.ReadOnly(name="a_reconciliation_stands", exclude=["evidence", "result"]),
            pgtrigger.Protect(name="a_reconciliation_is_never_deleted", operation=pgtrigger.Delete),
            not_emptied("reconciliations_are_not_emptied"),
        ]

    def __str__(self) -> str:
        return f"{self.user}: {self.verdict}"
